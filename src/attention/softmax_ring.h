// Softmax attention where ranks share the tokens of a micro-batch (attention/context.h).
#pragma once

#include "attention/context.h"
#include "ops/far_softmax.h"

namespace sbtrain {

// The queries that see the keys, and what both passes take beside them. Queries and keys are as
// SoftmaxForward takes them, rotated.
struct FarSoftmax {
  Tensor q_THd, k_THd, v_THd;
  ops::SoftmaxBias bias{};  // no FIRE
  ops::SoftmaxParams params{};
};

// o and lse of the keys of the chunks themselves become those of the keys of earlier chunks as
// well. `ring` was made before the ops for their own keys.
void add_far_softmax(Stream& s, const Tensor& o_THd, const Tensor& lse_HT, const FarSoftmax& x,
                     KeyRing& ring);

struct SoftmaxGradients {
  Tensor dq_THd, dk_THd, dv_THd;
};

// What the keys of earlier chunks give to the queries, and what later chunks give to the keys.
class FarSoftmaxBackward {
 public:
  // Computes it; o and lse are those of all keys, `ring` is of the backward pass. Gradients of keys
  // are on their way home beside what the stream is given from then on.
  FarSoftmaxBackward(Stream& s, const Tensor& do_THd, const Tensor& o_THd, const Tensor& lse_HT,
                     const FarSoftmax& x, std::unique_ptr<KeyRing> ring);
  // += to what the chunks themselves have given.
  void add_to(const SoftmaxGradients& sums);

 private:
  Stream& s_;
  std::unique_ptr<KeyRing> ring_;
  Buffer dq_THd_;
};

}  // namespace sbtrain
