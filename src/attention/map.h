// Attention maps: the share that each query gives to each key. They serve to inspect a model, not
// to run it: they are computed on the host in fp64 from the queries and keys that a forward pass
// saved.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "attention/attention.h"
#include "ops/attention.h"
#include "ops/rebased.h"

namespace sbtrain {

// The columns of one head of x [T, heads * width], which is on the device and may have strided
// rows. Waits for the stream.
HostMatrix download_head(Stream& s, const Tensor& x, int64_t heads, int64_t head);

// What is added to the logit of query j and key i; positions count from 0.
using LogitBias = std::function<double(int64_t j, int64_t i)>;
LogitBias no_bias();
LogitBias alibi_bias(int64_t heads, int64_t head);

// The tensors of FIRE (ops/attention.h), by their names there.
struct HostFire {
  HostMatrix c_1, m_1, w1_K, b1_K, w2_HK, b2_H;
  double length = ops::kFireLength;
};
HostFire download(Stream& s, const ops::FireTensors& fire);
LogitBias fire_bias(const HostFire& fire, int64_t head);

// The shares that the queries of one head give to keys. The rows of q and k are tokens.
FillWeights softmax_weights(HostMatrix q, HostMatrix k, const ops::SoftmaxParams& params,
                            LogitBias bias);
// `gate` has one column; without a forget gate it has no rows.
FillWeights stickbreaking_weights(HostMatrix q, HostMatrix k, HostMatrix gate,
                                  const ops::StickBreakingParams& params);
FillWeights rebased_weights(HostMatrix q, HostMatrix k, const ops::RebasedParams& params);

AttentionMap make_map(int64_t tokens, const FillWeights& fill, bool with_remainder = false);

}  // namespace sbtrain
