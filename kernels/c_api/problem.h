// What the structs of stick-breaking and of softmax attention have in common: their checks, the
// part of the workspace that comes before a kernel's own, and the kernels' problem.
#pragma once

#include <climits>

#include "kernels/attention/softmax.h"
#include "kernels/c_api/call.h"
#include "kernels/c_api/pack.h"
#include "kernels/limits.h"

namespace sbtrain::c_api {

using kernels::bf16;

// The caller's kv_heads, or what it stands for.
template <typename Call>
int kv_heads(const Call& x) {
  return x.kv_heads == 0 ? x.heads : x.kv_heads;
}

inline void check_rows(const char* name, const sbtrain_rows& rows, int64_t columns) {
  if (rows.data == nullptr) invalid(std::string(name) + " is null");
  if (reinterpret_cast<uintptr_t>(rows.data) % 16 != 0) {
    invalid(std::string(name) + " does not begin at a multiple of 16 bytes");
  }
  if (rows.stride < columns || rows.stride % 8 != 0) {
    invalid(std::string(name) + " has rows of " + std::to_string(columns) +
            " elements and a stride of " + std::to_string(rows.stride) +
            ", which is less or not a multiple of 8");
  }
}
inline void check_pointer(const char* name, const void* pointer) {
  if (pointer == nullptr) invalid(std::string(name) + " is null");
}
template <typename Call>
void check_heads(const Call& x) {
  require_field(x.heads > 0 && x.heads <= 65535, "heads", x.heads, "from 1 to 65535");
  require_field(kv_heads(x) > 0 && x.heads % kv_heads(x) == 0, "kv_heads", x.kv_heads,
                "a divisor of heads");
  require_field(x.head_dim > 0, "head_dim", x.head_dim, "positive");
}

// What workspace depends on.
template <typename Call>
void check_shape(const Call& x, const Device& device) {
  check_heads(x);
  require_field(x.head_dim % 8 == 0, "head_dim", x.head_dim, "a multiple of 8");
  const int most = device.much_shared ? kernels::kMaxAttentionHeadDim : kernels::kSmallHeadDim;
  if (x.head_dim > most) {
    unsupported("head_dim is " + std::to_string(x.head_dim) + ", but this GPU takes up to " +
                std::to_string(most));
  }
  require_field(x.tokens >= 0 && x.tokens <= INT_MAX / 2, "tokens", x.tokens, "from 0 to 2^30");
  require_field(x.sequences > 0 && x.sequences <= INT_MAX / 2, "sequences", x.sequences,
                "from 1 to 2^30");
  require_field(x.max_seqlen > 0 || x.tokens == 0, "max_seqlen", x.max_seqlen, "positive");
  if ((x.key_tokens != 0 && x.key_tokens != x.tokens) || x.key_cu_seqlens != nullptr) {
    unsupported(
        "key_tokens is " + std::to_string(x.key_tokens) + " and tokens " +
        std::to_string(x.tokens) +
        ": the kernels take as many keys as queries; put queries in front that are not used");
  }
  if (x.cu_seqlens == nullptr && x.tokens != x.sequences * x.max_seqlen) {
    invalid("tokens is " + std::to_string(x.tokens) + ", but without cu_seqlens there are " +
            std::to_string(x.sequences) + " documents of " + std::to_string(x.max_seqlen));
  }
}

template <typename Call>
void check_tensors(const Call& x, bool backward) {
  const int64_t many = int64_t{x.heads} * x.head_dim;
  const int64_t few = int64_t{kv_heads(x)} * x.head_dim;
  check_rows("q", x.q, many);
  check_rows("k", x.k, few);
  check_rows("v", x.v, few);
  if (!backward) return check_rows("o", x.o, many);
  check_rows("d_o", x.d_o, many);
  check_rows("dq", x.dq, many);
  check_rows("dk", x.dk, few);
  check_rows("dv", x.dv, few);
}

inline kernels::HeadRows head_rows(const sbtrain_rows& rows) {
  return {static_cast<bf16*>(rows.data), rows.stride};
}

// The pack, which is the first part of the workspace.
template <typename Call>
kernels::Pack pack_of(const Call& x, Workspace& workspace) {
  kernels::Pack pack{.tokens = static_cast<int>(x.tokens),
                     .sequences = static_cast<int>(x.sequences),
                     .max_seqlen = static_cast<int>(std::min<int64_t>(x.max_seqlen, INT_MAX)),
                     .given = x.cu_seqlens};
  pack.positions = workspace.take<int32_t>(x.tokens);
  // Taken even where they are given, so that the size does not depend on pointers.
  pack.cu_seqlens = workspace.take<int32_t>(x.sequences + 1);
  return pack;
}

template <typename Problem, typename Call>
Problem problem_of(const Call& x, const kernels::Pack& pack) {
  Problem p;
  p.tokens = static_cast<int>(x.tokens);
  p.heads = x.heads;
  p.head_dim = x.head_dim;
  p.scale = x.scale;
  p.cu_seqlens = x.cu_seqlens == nullptr ? pack.cu_seqlens : x.cu_seqlens;
  p.positions = pack.positions;
  p.sequences = static_cast<int>(x.sequences);
  p.group = x.heads / kv_heads(x);
  p.q = head_rows(x.q), p.k = head_rows(x.k), p.v = head_rows(x.v), p.o = head_rows(x.o);
  p.dout = head_rows(x.d_o), p.dq = head_rows(x.dq);
  p.dk = head_rows(x.dk), p.dv = head_rows(x.dv);
  return p;
}

// The bound of documents' lengths that kernels count with: none is longer than the pack.
template <typename Call>
int64_t longest(const Call& x) {
  return std::min(x.max_seqlen, x.tokens);
}

inline kernels::FireParameters fire_parameters(const sbtrain_fire& x) {
  check_pointer("fire.c", x.c);
  check_pointer("fire.m", x.m);
  check_pointer("fire.w1", x.w1);
  check_pointer("fire.b1", x.b1);
  check_pointer("fire.w2", x.w2);
  check_pointer("fire.b2", x.b2);
  const auto at = [](const void* data) { return static_cast<const bf16*>(data); };
  return {at(x.c), at(x.m), at(x.w1), at(x.b1), at(x.w2), at(x.b2)};
}
template <typename Call>
void check_bias(const Call& x) {
  require_field(x.bias >= SBTRAIN_BIAS_NONE && x.bias <= SBTRAIN_BIAS_FIRE, "bias", x.bias,
                "one of SBTRAIN_BIAS_...");
  require_field(x.window >= 0, "window", x.window, "0 or more");
  if (x.bias == SBTRAIN_BIAS_ALIBI && x.heads > kernels::kMaxAlibiHeads) {
    unsupported("ALiBi of " + std::to_string(x.heads) + " heads; up to " +
                std::to_string(kernels::kMaxAlibiHeads) + " are possible");
  }
}
inline void check_remainder(int remainder, const void* vector) {
  require_field(remainder >= SBTRAIN_REMAINDER_NONE && remainder <= SBTRAIN_REMAINDER_VECTOR,
                "remainder", remainder, "one of SBTRAIN_REMAINDER_...");
  if (remainder == SBTRAIN_REMAINDER_VECTOR) check_pointer("remainder_vector", vector);
}

}  // namespace sbtrain::c_api
