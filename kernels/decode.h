// Attention of one new token for each sequence against its cache, and appending to the cache.
#pragma once

#include "kernels/attention/position_bias.h"
#include "kernels/kept_keys.h"
#include "kernels/limits.h"
#include "kernels/scratch_sizes.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// cache [batch, capacity, cols], contiguous: cache[b, positions[b]] = x[b]; x [batch, cols]; both
// bf16 or both f32; positions i32 in [0, capacity): other values stop the kernel. Source:
// decode.cuh.
struct CacheAppend {
  Type type;
  void* cache;
  Matrix<const void> x;
  const int32_t* positions;
  int64_t batch, capacity, cols;
};
void launch(cudaStream_t stream, const CacheAppend& p);

// Row b of q attends to the keys [0, lengths[b]) of its cache; the last is the token itself.
// o, q [batch, heads * head_dim] bf16; caches [batch, capacity, key_heads * head_dim] bf16,
// contiguous, of which head h of q reads head h / (heads / key_heads); lengths i32 in
// [1, capacity]: other values stop the kernel.
struct Decode {
  Matrix<bf16> o;
  Matrix<const bf16> q;
  // The token's own key and value [batch, key_heads * head_dim], which are written to the caches;
  // null: they are there.
  Matrix<const bf16> k, v;
  bf16 *k_cache, *v_cache;
  const int32_t* lengths;
  int64_t batch, capacity;
  int heads, key_heads, head_dim;
  float scale;
  float* scratch;    // decode_scratch_floats()
  int32_t* arrived;  // [decode_blocks(multiprocessors)], zeros; zeros again afterwards
  // In place of the caches: pages of the keys that were kept. `lengths` then has one for each head
  // of keys, [batch, key_heads], and k and v are given.
  KeyPages pages{};
  // Begins before the kernel in front of it has ended (dependent_launch.cuh), and reads the lengths
  // and what the caches hold of earlier tokens then: no kernel since the last one that was launched
  // plainly may have written them.
  bool early;
};

// o = sum_i softmax_i(scale q.k_i) v_i over the last `window` keys, all of them if window is 0.
struct SoftmaxDecode {
  Decode t;
  int64_t window;
};
void softmax_decode(cudaStream_t stream, const SoftmaxDecode& p);
// The same with a bias on the logits by the distance of query and key (ops/attention.h).
void softmax_decode(cudaStream_t stream, const SoftmaxDecode& p, const AlibiSlopes& slopes);
void softmax_decode(cudaStream_t stream, const SoftmaxDecode& p, const FireParameters& parameters);

// Stick-breaking attention (ops/attention.h). The token's own key takes part only with
// attend_current. o += rem * its own value with remainder_value, o += rem * remainder_bias where
// that is not null.
struct StickBreakingDecode {
  Decode t;
  const float* gate_cache;     // f [batch, capacity, heads]; f = 1 if null; pages have their own
  const bf16* remainder_bias;  // [heads * head_dim], may be null
  bool remainder_value;
  bool attend_current;
  float skip_epsilon;  // keys may be skipped where the stick is known to be shorter
};
void stickbreaking_decode(cudaStream_t stream, const StickBreakingDecode& p);

}  // namespace sbtrain::kernels
