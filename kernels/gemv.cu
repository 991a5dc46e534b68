// Products of one row, as one sequence needs them to decode a token, on Hopper and later.
#include "kernels/device_attribute.h"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/primitives/stamps.cuh"
#include "kernels/primitives/thread_group.cuh"
#include "kernels/primitives/tma.cuh"
#include "kernels/skinny_gemm.cuh"

namespace sbtrain::kernels {

extern __shared__ __align__(128) unsigned char memory[];

namespace {

using namespace products;

// The warp that copies the block's rows of w is not one of those that compute. The copy engine
// takes its requests one after the other, while loads of the other warps, and of other blocks on
// the multiprocessor, pass them by: loads that follow tens of kilobytes of copies by the threads
// themselves (cp.async) wait until these have arrived. The inputs come microseconds sooner this
// way.
constexpr int kThreadsAndCopier = kThreads + 32;

// A row of w arrives in parts, each of the channels of some warps.
constexpr int kParts = 2;
[[maybe_unused]] constexpr int kWarpsOfPart = kWarps / kParts;

// A product for blocks of kOutputs outputs, of which fewer than a tile has are those of its first
// rows.
template <int kOutputs>
struct Gemv {
  static constexpr int kTiles = (kOutputs + kTileOutputs - 1) / kTileOutputs;
  SkinnyGemm p;
  int of_warp;  // chunks

  // From row to row of w in shared memory, so that the lanes that read a chunk of two neighbouring
  // rows meet all banks.
  __host__ __device__ int row_bytes() const {
    const int bytes = 2 * static_cast<int>(p.k);
    return bytes + (bytes % 128 == 0 ? 64 : 0);
  }
  // Of the sums of warps, the squares, the barriers, and what aligns them.
  static constexpr size_t kStaticBytes = sizeof(float[kWarps][kTileOutputs * kTiles + 1]) + 128;
  size_t shared_bytes() const { return size_t{kOutputs} * row_bytes() + 2 * p.k; }

  // Row r of the block; null where w has no more rows.
  __device__ const bf16* row(int r) const {
    if (!p.swiglu) return output(r) < p.n ? p.w.row(output(r)) : nullptr;
    const int of_tile = r % kTileOutputs;
    const int64_t to = output(r / kTileOutputs * kHalf + of_tile % kHalf);
    if (to >= p.n) return nullptr;
    return p.w.row(of_tile >= kHalf ? p.n + to : to);
  }
  __device__ int64_t output(int i) const {
    return int64_t{blockIdx.x} * (p.swiglu ? kOutputs / 2 : kOutputs) + i;
  }
};

// By one warp.
template <int kOutputs>
__device__ __forceinline__ void copy_weights(const Gemv<kOutputs>& x, Mbarrier (&arrived)[kParts]) {
  static_assert(kOutputs <= 32);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bf16* const row = lane < kOutputs ? x.row(lane) : nullptr;
  const int rows = __popc(__ballot_sync(~0u, row != nullptr));
  const int of_part = kWarpsOfPart * x.of_warp * kChunk;
  for (int part = 0; part < kParts; ++part) {
    const int first = part * of_part;
    const int bytes = 2 * max(0, min(of_part, static_cast<int>(x.p.k) - first));
    if (lane == 0) arrived[part].arrive_and_expect(rows * bytes);
    __syncwarp();
    if (row != nullptr && bytes > 0) {
      bulk_load(memory + lane * x.row_bytes() + 2 * first, row + first, bytes, arrived[part]);
    }
  }
}

// A warp's share of the channels.
struct Share {
  __device__ Share(int64_t k, int of_warp, int warp)
      : first(warp * of_warp * kChunk),
        chunks(max(0, min(of_warp, (static_cast<int>(k) - first) / kChunk))) {}
  __device__ int vectors() const { return kChunkVectors * chunks; }  // of eight channels
  // Vector v of the share of a row.
  __device__ Eight load(const bf16* row, int v) const {
    return load_eight<true>(row + first, 8 * v, 8 * vectors());
  }
  int first, chunks;
};

// Puts the warp's share of the row of x, or of its norm, to `inputs`. `first_weight` and
// `first_input` are the lane's first vectors. All warps of the group call it.
[[maybe_unused]] __device__ __forceinline__ void put_inputs(
    bf16* inputs, const SkinnyGemm& p, const Share& share, const Eight& first_weight,
    const Eight& first_input, float (&squares)[kWarps][1], const NamedThreads<kThreads>& group) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int vectors = share.vectors();
  const bool norms = p.norm_w != nullptr;
  const auto input = [&](int v) { return v == lane ? first_input : share.load(p.x.data, v); };
  float factor = 0.0f;
  if (norms) {
    const float sum = sum_squares(vectors, lane, input);
    if (lane == 0) squares[warp][0] = sum;
    group.sync();
    factor = inverse_rms(squares, 0, p);
  }
  for (int v = lane; v < vectors; v += 32) {
    Eight y = input(v);
    if (norms) y = normalise(y, v == lane ? first_weight : share.load(p.norm_w, v), factor);
    store_eight(inputs + 8 * v, y);
  }
  __syncwarp();
}

// The products of the warp's share of the rows from `rows` on, which lies in shared memory.
template <int kOutputs>
__device__ __forceinline__ void multiply(float (&products)[Gemv<kOutputs>::kTiles][4],
                                         const Gemv<kOutputs>& x, int chunks,
                                         const unsigned char* rows, const bf16* inputs) {
  constexpr int kTiles = Gemv<kOutputs>::kTiles;
  [[maybe_unused]] constexpr int kUnroll = kTiles > 1 ? 3 : 6;
#pragma unroll kUnroll
  for (int chunk = 0; chunk < chunks; ++chunk) {
    // All eight columns of the product are this row; the first one is stored.
    const Eight of_x = load_eight(inputs + kChunk * chunk);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const unsigned char* const at = rows + 2 * kChunk * chunk + kTileOutputs * i * x.row_bytes();
      const Eight high = kOutputs > kHalf ? load_eight(at + kHalf * x.row_bytes()) : Eight{};
      multiply_chunk(products[i], load_eight(at), high, of_x);
    }
  }
}

// Adds the warps' products in the order of the warps, and stores what becomes of them.
template <int kOutputs>
__device__ __forceinline__ void store_sums(
    const float (&products)[Gemv<kOutputs>::kTiles][4], const Gemv<kOutputs>& x, float residual,
    float (&sums)[kWarps][kTileOutputs * Gemv<kOutputs>::kTiles],
    const NamedThreads<kThreads>& group) {
  const SkinnyGemm& p = x.p;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int out = static_cast<int>(threadIdx.x);
  if (lane % kChunkVectors == 0) {
    const int g = lane / kChunkVectors;
#pragma unroll
    for (int i = 0; i < Gemv<kOutputs>::kTiles; ++i) {
      sums[warp][kTileOutputs * i + g] = products[i][0];
      sums[warp][kTileOutputs * i + kHalf + g] = products[i][2];
    }
  }
  group.sync();
  const auto sum_over_warps = [&](int i) {
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) sum += sums[from][i];
    return p.alpha * sum;
  };
  if (!p.swiglu) {
    if (out < kOutputs) store_output(p, 0, x.output(out), sum_over_warps(out) + residual);
  } else if (out < kOutputs / 2) {
    const int gate = out / kHalf * kTileOutputs + out % kHalf;
    store_output(p, 0, x.output(out),
                 swiglu(p, sum_over_warps(gate), sum_over_warps(gate + kHalf)));
  }
}

// The sums have the order of those of skinny_gemm.cu, and so the same bits.
template <int kOutputs>
__global__ void __launch_bounds__(kThreadsAndCopier, kOutputs > kTileOutputs ? 2 : 4)
    gemv_kernel(const __grid_constant__ Gemv<kOutputs> x) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  constexpr int kTiles = Gemv<kOutputs>::kTiles;
  __shared__ float squares[kWarps][1];
  __shared__ float sums[kWarps][kTileOutputs * kTiles];
  __shared__ Mbarrier arrived[kParts];
  Stamps stamps;
  stamps.take(0);
  const SkinnyGemm& p = x.p;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  let_next_kernel_begin();
  if (threadIdx.x == kThreads) {
    for (Mbarrier& barrier : arrived) barrier.init(1);
    fence_mbarrier_init();
  }
  __syncthreads();
  if (warp == kWarps) {
    copy_weights(x, arrived);
    wait_for_previous_kernel();
    return;
  }
  const NamedThreads<kThreads> group{1, 0};
  const Share share(p.k, x.of_warp, warp);
  const bool has_input = lane < share.vectors();
  const bool has_weight = has_input && p.norm_w != nullptr;
  const Eight first_weight = has_weight ? share.load(p.norm_w, lane) : Eight{};
  wait_for_previous_kernel();
  stamps.take(1);
  const Eight first_input = has_input ? share.load(p.x.data, lane) : Eight{};
  const int out = static_cast<int>(threadIdx.x);
  const float residual = out < kOutputs ? load_residual(p, 0, x.output(out)) : 0.0f;
  bf16* const inputs = reinterpret_cast<bf16*>(memory + kOutputs * x.row_bytes()) + share.first;
  put_inputs(inputs, p, share, first_weight, first_input, squares, group);

  stamps.take(2);
  const int g = lane / kChunkVectors;
  const int q = lane % kChunkVectors;
  const unsigned char* const rows = memory + g * x.row_bytes() + 2 * (share.first + 8 * q);
  float products[kTiles][4] = {};
  if (share.chunks > 0) arrived[warp / kWarpsOfPart].wait(0);
  stamps.take(3);
  multiply<kOutputs>(products, x, share.chunks, rows, inputs + 8 * q);
  stamps.take(4);
  store_sums<kOutputs>(products, x, residual, sums, group);
  stamps.take(5);
  if (threadIdx.x == 0) stamps.keep(p.n, p.k);
#else
  __trap();
#endif
}

template <int kOutputs>
bool launch(cudaStream_t stream, const SkinnyGemm& p) {
  const Gemv<kOutputs> x{p, chunks_of_warp(p.k)};
  if (x.shared_bytes() + x.kStaticBytes > most_shared_bytes()) return false;
  if (!compiled_for_hopper(gemv_kernel<kOutputs>)) return false;
  launch_early("gemv", p.early, stream, gemv_kernel<kOutputs>,
               {.grid = dim3(blocks(p.n, kOutputs / (p.swiglu ? 2 : 1))),
                .threads = kThreadsAndCopier,
                .shared_bytes = x.shared_bytes()},
               x);
  return true;
}

}  // namespace

bool gemv(cudaStream_t stream, const SkinnyGemm& p) {
  if (p.rows != 1 || p.k % kChunk != 0) return false;
  write_stamps_at_exit("gemv");
  if (prefers_two_tiles(p)) return launch<2 * kTileOutputs>(stream, p);
  // Blocks of few channels are short enough to start more of them.
  if (p.k <= kMostForTwoTiles && !p.swiglu) return launch<kHalf>(stream, p);
  return launch<kTileOutputs>(stream, p);
}

}  // namespace sbtrain::kernels
