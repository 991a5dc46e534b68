#include "kernels/elementwise.cuh"
#include "kernels/kept_keys.cuh"
#include "kernels/pack.cuh"

namespace sbtrain::kernels {
namespace {

// What is not below the bound is kept, and what is no number with it.
__device__ bool keeps(const float* gates, int group, float bound) {
  bool kept = false;
  for (int i = 0; i < group; ++i) kept = kept || !(gates[i] < bound);
  return kept;
}

constexpr int kScanThreads = 1024;

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

// A row is a token and a head: its key and its value.
struct StoreKeysOp {
  template <int kWidth>
  struct Loaded {
    int row;
    Pack<bf16, kWidth> k, v;
  };
  StoreKeys p;
  __device__ int64_t token(int64_t row) const { return row / p.key_heads; }
  __device__ int key_head(int64_t row) const { return static_cast<int>(row % p.key_heads); }
  template <int kWidth>
  __device__ Loaded<kWidth> load(int64_t row, int64_t col) const {
    const int64_t t = token(row);
    const int g = key_head(row);
    const int64_t from = int64_t{g} * p.head_dim + col;
    return {p.rows[g * p.tokens + t], load_pack<kWidth>(p.k.row(t) + from),
            load_pack<kWidth>(p.v.row(t) + from)};
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Loaded<kWidth>& loaded) const {
    if (loaded.row < 0) return;
    const int64_t t = token(row);
    const int g = key_head(row);
    require(loaded.row < p.pages.most * kPageKeys);
    const int at = loaded.row % kPageKeys;
    auto* const page = static_cast<bf16*>(page_of(p.pages.of_head(0, g), loaded.row));
    store_pack(page + at * p.head_dim + col, loaded.k);
    store_pack(page + (kPageKeys + at) * p.head_dim + col, loaded.v);
    if (col != 0) return;
    const int group = p.heads / p.key_heads;
    auto* const gates = reinterpret_cast<float*>(page + 2 * kPageKeys * p.head_dim) + at * group;
    for (int i = 0; i < group; ++i) gates[i] = p.gate.row(t)[g * group + i];
  }
};

__global__ void __launch_bounds__(kElementwiseThreads) place_keys_kernel(const PlaceKeys p) {
  const int64_t at = int64_t{blockIdx.x} * kElementwiseThreads + threadIdx.x;
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
  keep_keys_kernel<<<static_cast<unsigned>(p.key_heads), kScanThreads, 0, stream>>>(p);
  check_launch("keep_keys");
}

void launch(cudaStream_t stream, const StoreKeys& p) {
  const bool vectors = p.head_dim % 8 == 0 && vectors_fit<8>(p.k, p.v);
  launch_elementwise<8>(stream, "store_keys", p.tokens * p.key_heads, p.head_dim, vectors,
                        StoreKeysOp{p});
}

void launch(cudaStream_t stream, const PlaceKeys& p) {
  const int64_t rows = p.batch * p.key_heads;
  if (rows == 0) return;
  place_keys_kernel<<<blocks(rows, kElementwiseThreads), kElementwiseThreads, 0, stream>>>(p);
  check_launch("place_keys");
}

}  // namespace sbtrain::kernels
