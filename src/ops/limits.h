// Checks that refuse models too large for the CUDA kernels. Each throws ExitCode::kConfig and names
// the setting to change. They run when a configuration is planned for CUDA, which needs no GPU.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/target.h"
#include "core/tensor.h"

namespace sbtrain::ops {

void check_norm_width(std::string_view op, int64_t width);
void check_norm_head_dim(std::string_view op, int64_t head_dim);
void check_rope_head_dim(std::string_view op, int64_t head_dim);
// Of queries, in a pack or in a step of decoding.
void check_attention_heads(std::string_view op, const Tensor& q, int heads, const Target& target);
void check_decode_heads(std::string_view op, const Tensor& q, int heads);
void check_alibi_heads(std::string_view op, int64_t heads);
// Keys and values of Based or ReBased.
void check_rebased_heads(std::string_view op, const Tensor& k, const Tensor& v, int heads);

}  // namespace sbtrain::ops
