// Chooses the source of the next row: the one that is furthest below its share of the tokens.
// After any number of rows each source is within about one row of its share.
#pragma once

#include <cstdint>
#include <vector>

namespace sbtrain {

class Mixture {
 public:
  // Positive weights, relative to each other. Throws ExitCode::kConfig.
  explicit Mixture(const std::vector<double>& weights);
  // Continues after `taken` tokens of each source.
  Mixture(const std::vector<double>& weights, std::vector<int64_t> taken);

  // The source of the next row of up to `row_tokens` tokens; ties go to the first.
  int pick(int64_t row_tokens) const;
  void add(int source, int64_t tokens);
  const std::vector<int64_t>& taken() const { return taken_; }

 private:
  // Shares in units of 2^-32: integer arithmetic gives the same choice on every machine.
  std::vector<int64_t> shares_;
  std::vector<int64_t> taken_;  // tokens
  int64_t total_ = 0;
};

}  // namespace sbtrain
