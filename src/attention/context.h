// What attention does where ranks share the tokens of a micro-batch (train.context_parallel): the
// keys and values of the ranks travel around a ring, one transfer after the other, beside the
// attention to those that have come.
//
// Each of N ranks holds T tokens that follow each other in the pack: rank r those from r T on. Each
// makes the same N - 1 transfers in every pass of a layer, whatever its documents, since all must
// take part. The modules that support it say so in their registration (attention/registry.h).
#pragma once

#include <cstdint>
#include <optional>

#include "core/context_share.h"
#include "core/memory.h"
#include "core/sequences.h"
#include "core/stream.h"
#include "ops/far_keys.h"

namespace sbtrain {

// The keys and values of all other ranks, one rank after the other. The constructor starts the
// first transfer, so that what the stream is given before the first next() runs beside it.
class KeyRing {
 public:
  // The order in which the keys of earlier ranks come. Ranks after this one, whose keys its tokens
  // do not see, come between or around them.
  enum class Order : uint8_t { kNearestFirst, kFarthestFirst };
  // k and v, [T, G*d], of this rank.
  KeyRing(Stream& s, const ContextShare& share, const Tensor& k, const Tensor& v, Order order);
  // Goes on to the next rank; false after the last.
  bool next();
  int rank() const { return rank_; }
  bool earlier() const { return rank_ < share_.ranks->place(); }
  // What this rank's tokens see of the rank: nothing of later ones.
  ops::FarKeys keys() const {
    if (!earlier()) return {};
    return {.queries = share_.continued, .keys = share_.keys_of(rank_)};
  }
  // How many tokens before this rank's first one the rank's first one lies.
  int64_t distance() const { return (share_.ranks->place() - rank_) * share_.tokens; }
  Tensor k() const { return part(held_, 0); }
  Tensor v() const { return part(held_, 1); }
  // The k and v of a buffer [2, T, G*d].
  static Tensor part(const Tensor& kv, int64_t index);

 private:
  void start();

  Stream& s_;
  const ContextShare& share_;
  const int step_;
  int hop_ = 0;
  int rank_;
  Buffer held_, coming_;
  Event arrives_;
};

// The gradients of keys and values, f32, which follow them from rank to rank until they are home:
// sums over the ranks, in one order.
class KeyGradientRing {
 public:
  KeyGradientRing(Stream& s, const ContextShare& share, const Tensor& k);
  // For the next keys of a KeyRing that goes farthest first: takes over the sums of the ranks that
  // have had them before.
  void next();
  // After the last keys: dk and dv become those of this rank's keys.
  void home();
  Tensor dk() const { return KeyRing::part(held_, 0); }
  Tensor dv() const { return KeyRing::part(held_, 1); }

 private:
  void pass_on();
  Stream& s_;
  const ContextShare& share_;
  bool first_ = true;
  Buffer held_;
};

}  // namespace sbtrain
