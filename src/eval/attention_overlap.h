// How far a head's attention agrees with the positions that a task says are the true ones: where a
// query's answer stands (intersection over union, as arXiv 2402.10644 has it for associative
// recall).
#pragma once

#include <cstdint>
#include <span>

#include "attention/attention.h"

namespace sbtrain {

struct TruePosition {
  int64_t query = 0;  // token that looks something up
  int64_t key = 0;    // token that it should attend to; a query may have several
  bool operator==(const TruePosition&) const = default;
};

// Sums over the rows of all queries that have true keys. With A the weights of those rows and M
// their true keys (1, else 0):
//   top        P: for each query its n largest weights, n the number of its true keys; of equal
//              weights the nearest key       |P and M| / |P or M|
//   threshold  P: weights above `threshold`  |P and M| / |P or M|
//   soft       sum min(A, M) / sum max(A, M)
class AttentionOverlap {
 public:
  explicit AttentionOverlap(double threshold) : threshold_(threshold) {}

  // Throws ExitCode::kData for positions outside of the map, or a key behind its query.
  void add(const AttentionMap& map, std::span<const TruePosition> positions);

  int64_t queries() const { return queries_; }
  double top() const;  // NaN without queries, as the others
  double threshold() const;
  double soft() const;
  double mass() const;  // mean over the queries of the weight of their true keys

 private:
  struct Ratio {
    double intersection = 0, all = 0;
    double value() const;
  };
  double threshold_;
  int64_t queries_ = 0;
  double mass_ = 0;
  Ratio top_, above_, soft_;
};

}  // namespace sbtrain
