// How far a head's attention agrees with the true positions of a task, those of the answers to its
// queries (intersection over union, as arXiv 2402.10644 defines it for associative recall).
#pragma once

#include <cstdint>
#include <span>

#include "attention/attention.h"

namespace sbtrain {

struct TruePosition {
  int64_t query = 0;  // position of the token that attends
  int64_t key = 0;    // position that it should attend to; a query may have several keys
  bool operator==(const TruePosition&) const = default;
};

// Sums over the rows of all queries that have true keys. A is the weights of those rows, M is 1 at
// their true keys and 0 elsewhere, and P is the set of keys that count as attended:
//   top        |P and M| / |P or M|, with P the keys of each query's n largest weights, where n is
//              the number of its true keys; of equal weights, the nearest key comes first
//   threshold  |P and M| / |P or M|, with P the keys of weights above `threshold`
//   soft       sum min(A, M) / sum max(A, M)
class AttentionOverlap {
 public:
  explicit AttentionOverlap(double threshold) : threshold_(threshold) {}

  // Throws ExitCode::kData for positions outside of the map, or a key after its query.
  void add(const AttentionMap& map, std::span<const TruePosition> positions);

  int64_t queries() const { return queries_; }
  double top() const;  // NaN without queries; so are the others
  double threshold() const;
  double soft() const;
  double mass() const;  // the total weight of a query's true keys, mean over the queries

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
