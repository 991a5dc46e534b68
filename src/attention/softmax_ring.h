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

// o and lse of this rank's own keys become those of the keys of earlier ranks as well. `ring` was
// made before the op for its own keys.
void add_far_softmax(Stream& s, const Tensor& o_THd, const Tensor& lse_HT, const FarSoftmax& x,
                     KeyRing& ring);

// dq += what the keys of earlier ranks give to the queries, dk and dv += what later ranks give to
// this one's keys. o and lse are those of all keys.
struct SoftmaxGradients {
  Tensor dq_THd, dk_THd, dv_THd;
};
void far_softmax_backward(Stream& s, const SoftmaxGradients& sums, const Tensor& do_THd,
                          const Tensor& o_THd, const Tensor& lse_HT, const FarSoftmax& x,
                          const ContextShare& share);

}  // namespace sbtrain
