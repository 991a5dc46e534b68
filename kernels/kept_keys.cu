#include "kernels/kept_keys.cuh"
#include "kernels/pack.cuh"
#include "kernels/primitives/dependent_launch.cuh"

namespace sbtrain::kernels {
namespace {

// What is not below the bound is kept, and what is no number with it.
__device__ bool keeps(const float* gates, int group, float bound) {
  bool kept = false;
  for (int i = 0; i < group; ++i) kept = kept || !(gates[i] < bound);
  return kept;
}

constexpr int kScanThreads = 1024;
constexpr int kKeysThreads = 256;

// Block g finds the rows of head g, kScanThreads tokens at a time.
__global__ void __launch_bounds__(kScanThreads) keep_keys_kernel(const KeepKeys p) {
  constexpr int kWarps = kScanThreads / 32;
  __shared__ int of_warp[kWarps];
  const int group = p.heads / p.key_heads;
  const auto g = static_cast<int>(blockIdx.x);
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32;
  int count = 0;  // before these tokens
  for (int64_t first = 0; first < p.tokens; first += kScanThreads) {
    const int64_t t = first + thread;
    const bool kept = t < p.tokens && keeps(p.gate.row(t) + g * group, group, p.bound);
    const unsigned votes = __ballot_sync(~0u, kept);
    if (lane == 0) of_warp[warp] = __popc(votes);
    __syncthreads();
    int before = 0, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += of_warp[w];
      all += of_warp[w];
    }
    if (t < p.tokens) {
      const int row = count + before + __popc(votes & ((1u << lane) - 1));
      p.rows[g * p.tokens + t] = kept ? row : -1;
    }
    count += all;
    __syncthreads();  // before the next tokens overwrite of_warp
  }
  if (thread == 0) p.counts[g] = count;
}

// A thread copies kWidth channels of the key and value of one token and head.
template <int kWidth>
__global__ void __launch_bounds__(kKeysThreads)
    store_keys_kernel(const StoreKeys p, int64_t packs) {
  const int64_t pack = int64_t{blockIdx.x} * kKeysThreads + threadIdx.x;
  if (pack >= packs) return;
  const int64_t of_row = p.head_dim / kWidth;
  const int64_t key = pack / of_row;  // of all tokens' heads
  const int64_t col = (pack - key * of_row) * kWidth;
  const int64_t t = key / p.key_heads;
  const auto g = static_cast<int>(key - t * p.key_heads);
  const int row = p.rows[g * p.tokens + t];
  if (row < 0) return;
  require(row < p.pages.most * kPageKeys);
  const int at = row % kPageKeys;
  auto* const page = static_cast<bf16*>(page_of(p.pages.of_head(0, g), row));
  const int64_t from = int64_t{g} * p.head_dim + col;
  store_pack(page + at * p.head_dim + col, load_pack<kWidth>(p.k.row(t) + from));
  store_pack(page + (kPageKeys + at) * p.head_dim + col, load_pack<kWidth>(p.v.row(t) + from));
  if (col != 0) return;
  const int group = p.heads / p.key_heads;
  auto* const gates = reinterpret_cast<float*>(page + 2 * kPageKeys * p.head_dim) + at * group;
  for (int i = 0; i < group; ++i) gates[i] = p.gate.row(t)[g * group + i];
}

__global__ void __launch_bounds__(kKeysThreads) place_keys_kernel(const PlaceKeys p) {
  const int64_t at = int64_t{blockIdx.x} * kKeysThreads + threadIdx.x;
  if (at >= p.batch * p.key_heads) return;
  const int64_t b = at / p.key_heads;
  const auto g = static_cast<int>(at - b * p.key_heads);
  const int group = p.heads / p.key_heads;
  int32_t& count = p.counts.row(b)[g];
  const int row = p.positions[b] == 0 ? 0 : count;
  require(row >= 0 && row < p.pages.most * kPageKeys);
  const float* const gate = p.gate.row(b) + g * group;
  auto* const page = static_cast<bf16*>(page_of(p.pages.of_head(b, g), row));
  auto* const gates =
      reinterpret_cast<float*>(page + 2 * kPageKeys * p.head_dim) + row % kPageKeys * group;
  for (int i = 0; i < group; ++i) gates[i] = gate[i];
  p.lengths[at] = row + 1;
  count = row + (keeps(gate, group, p.bound) ? 1 : 0);
}

}  // namespace

void launch(cudaStream_t stream, const KeepKeys& p) {
  if (p.key_heads == 0) return;
  launch_early("keep_keys", /*early=*/false, stream, keep_keys_kernel,
               {dim3(static_cast<unsigned>(p.key_heads)), kScanThreads}, p);
}

void launch(cudaStream_t stream, const StoreKeys& p) {
  if (p.tokens == 0) return;
  const bool vectors = p.head_dim % 8 == 0 && vectors_fit<8>(p.k, p.v);
  with_width<8>(vectors, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const int64_t packs = p.tokens * p.key_heads * (p.head_dim / kWidth);
    launch_early("store_keys", /*early=*/false, stream, store_keys_kernel<kWidth>,
                 {dim3(blocks(packs, kKeysThreads)), kKeysThreads}, p, packs);
  });
}

void launch(cudaStream_t stream, const PlaceKeys& p) {
  const int64_t rows = p.batch * p.key_heads;
  if (rows == 0) return;
  launch_early("place_keys", /*early=*/false, stream, place_keys_kernel,
               {dim3(blocks(rows, kKeysThreads)), kKeysThreads}, p);
}

}  // namespace sbtrain::kernels
