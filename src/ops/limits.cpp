#include "ops/limits.h"

#include "core/error.h"
#include "kernels/attention/rebased_index.h"
#include "kernels/limits.h"

namespace sbtrain::ops {
namespace {

void check_head_dim(std::string_view op, int64_t head_dim, int64_t most) {
  if (head_dim <= most) return;
  fail(
      ExitCode::kConfig,
      "{} on CUDA: the head dimension is {} (model.head_dim, or model.width / model.heads), but at "
      "most {} is possible; lower model.head_dim or raise model.heads",
      op, head_dim, most);
}

// GPUs with 99 KiB of shared memory for a block; others from compute capability 8.0 on have 163 or
// more.
bool little_shared_memory(const Target& target) {
  return target.sm == 86 || target.sm == 89 || target.sm / 10 == 12;
}

}  // namespace

void check_norm_width(std::string_view op, int64_t width) {
  if (width <= kernels::kMaxNormWidth) return;
  fail(ExitCode::kConfig,
       "{} on CUDA: rows have {} elements, but at most {} are possible; lower model.width or, for "
       "the "
       "norm of queries and keys, model.attention.feature_dim or the number or size of heads",
       op, width, kernels::kMaxNormWidth);
}

void check_norm_head_dim(std::string_view op, int64_t head_dim) {
  check_head_dim(op, head_dim,
                 head_dim % 8 == 0 ? kernels::kMaxHeadDim : kernels::kMaxScalarHeadDim);
}

void check_rope_head_dim(std::string_view op, int64_t head_dim) {
  check_head_dim(op, head_dim, 2 * kernels::kMaxRopeFrequencies);
}

void check_attention_heads(std::string_view op, const Tensor& q, int heads, const Target& target) {
  const int64_t head_dim = q.cols() / heads;
  check_head_dim(
      op, head_dim,
      little_shared_memory(target) ? kernels::kSmallHeadDim : kernels::kMaxAttentionHeadDim);
  if (head_dim % 8 == 0) return;
  fail(ExitCode::kConfig,
       "{} on CUDA: the head dimension is {} (model.head_dim, or model.width / model.heads), which "
       "is not a multiple of 8; change model.head_dim or model.heads",
       op, head_dim);
}

void check_decode_heads(std::string_view op, const Tensor& q, int heads) {
  check_head_dim(op, q.cols() / heads, kernels::kMaxDecodeHeadDim);
}

void check_alibi_heads(std::string_view op, int64_t heads) {
  if (heads <= kernels::kMaxAlibiHeads) return;
  fail(ExitCode::kConfig,
       "{} with ALiBi on CUDA: {} heads, but at most {} are possible; lower model.heads", op, heads,
       kernels::kMaxAlibiHeads);
}

void check_rebased_heads(std::string_view op, const Tensor& k, const Tensor& v, int heads) {
  const int64_t features = k.cols() / heads, values = v.cols() / heads;
  if (features <= kernels::kMaxRebasedFeatures && values <= kernels::kMaxRebasedValues) return;
  fail(ExitCode::kConfig,
       "{} on CUDA: heads have {} features (model.attention.feature_dim) and {} values "
       "(model.head_dim, or model.width / model.heads); at most {} and {} are possible",
       op, features, values, kernels::kMaxRebasedFeatures, kernels::kMaxRebasedValues);
}

}  // namespace sbtrain::ops
