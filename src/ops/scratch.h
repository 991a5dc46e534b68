// Scratch that several ops take.
#pragma once

#include "kernels/scratch_sizes.h"
#include "ops/op.h"

namespace sbtrain::ops {

// How an op runs on a GPU, which ops/choose.h chooses once, and the scratch that this takes.
template <typename Choice>
struct Planned {
  Choice choice{};
  Buffer buffer;
  operator const Buffer&() const { return buffer; }  // NOLINT: the CPU has no choice
};
// Both for an op of attention, whose scratch is called `name`: for the stream's target, with the
// implementation that is forced on the stream, if any. On the CPU there is nothing to choose.
template <typename Choice, typename Op>
Planned<Choice> plan(const Stream& s, const Op& op, std::string_view name = Op::kName);

// Sums over tokens are formed in this many parts, always the same ones, and the parts are added in
// order: the result does not depend on the number of threads or blocks.
inline int64_t token_parts(const Stream& s) {
  return on_cuda(s) ? kernels::kTokenParts : 32;
}

// One row of partial sums for each part.
inline Buffer token_partials(const Stream& s, int64_t cols) {
  return s.scratch("partial sums over tokens", DType::kF32, {token_parts(s), cols});
}

// The workspace that cuBLASLt may use for one product.
inline Buffer linear_workspace(const Stream& s) {
  if (!on_cuda(s)) return {};
  return s.scratch("cuBLASLt", DType::kI32, {int64_t{32} << 18});
}

}  // namespace sbtrain::ops
