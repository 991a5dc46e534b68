// Attention maps: which share each query gives to each key. They are for looking at a model, not
// for running it: computed on the host in fp64 from the queries and keys that a forward pass left.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "attention/attention.h"
#include "ops/ops.h"
#include "ops/softmax_bias.h"

namespace sbtrain {

// One head's columns of a matrix, on the host.
struct HeadRows {
  int64_t tokens = 0;
  int64_t width = 0;
  std::vector<double> values_TN;
  const double* row(int64_t t) const { return values_TN.data() + t * width; }
};

// x [T, heads * width] of the device, rows may be strided; waits for it.
HeadRows download_head(Stream& s, const Tensor& x, int64_t heads, int64_t head);

// What is added to the logit of query j and key i, positions from 0.
using LogitBias = std::function<double(int64_t j, int64_t i)>;
LogitBias no_bias();
// Of ALiBi or FIRE (ops/softmax_bias.h) for one head.
LogitBias position_bias(Stream& s, const ops::SoftmaxBias& bias, int64_t heads, int64_t head);

AttentionMap softmax_map(const HeadRows& q, const HeadRows& k, const ops::SoftmaxParams& params,
                         const LogitBias& bias);
// gate: one column, or no token for none.
AttentionMap stickbreaking_map(const HeadRows& q, const HeadRows& k, const HeadRows& gate,
                               const ops::StickBreakingParams& params);
AttentionMap rebased_map(const HeadRows& q, const HeadRows& k, const ops::RebasedParams& params);

}  // namespace sbtrain
