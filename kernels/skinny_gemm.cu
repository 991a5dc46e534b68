#include "kernels/device_attribute.h"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/primitives/stamps.cuh"
#include "kernels/skinny_gemm.cuh"

namespace sbtrain::kernels {

extern __shared__ __align__(128) unsigned char memory[];

namespace {

using namespace products;

// The matrix is read once for little arithmetic, so what counts is that its bytes never stop
// coming. Each warp copies its part of w to shared memory, before it waits for the kernel in front:
// while that kernel and those before it compute, the weights of the next ones arrive, as many as
// the shared memory of all multiprocessors holds.

// From this many channels on, products of several rows are faster with fewer registers: blocks of
// other kernels find room beside them. With fewer channels they are slower.
constexpr int64_t kFewestForFour = 6 * kChunk * kWarps;

// How the channels of a matrix are shared: warp i has the chunks [i * of_warp, (i + 1) * of_warp),
// as far as there are any. A stage is what a warp copies at once: its part of each row of w that
// the block has, and of each row of x.
struct Split {
  int of_warp;
  int of_stage;
  int stages;  // in shared memory
  int rows;    // of a stage
  __host__ __device__ bool holds_all() const { return stages * of_stage >= of_warp; }
};

template <int kOutputTiles, int kRowTiles>
struct Sizes {
  static constexpr int kMostStages = 2;
  static constexpr int kMostOfStage = kRowTiles == 1 ? 8 : 2;  // chunks
  static constexpr int kOutputs = kTileOutputs * kOutputTiles;
  static constexpr int kRows = kTileRows * kRowTiles;
  static constexpr int kStride = kRows + 10;  // so that the sums are read without bank conflicts
  static constexpr int kSumBytes = kTileOutputs * kStride * 4;  // of one tile and warp
  static constexpr size_t kStaticBytes = sizeof(float[kWarps][kRows]);

  static size_t shared_bytes(const Split& split) { return size_t{kWarps} * warp_bytes(split); }
  __host__ __device__ static unsigned warp_bytes(const Split& split) {
    const int bytes = split.stages * split.rows * split.of_stage * kChunk * 2;
    return static_cast<unsigned>(bytes > kSumBytes ? bytes : kSumBytes);
  }
  // The largest stages that fit, and of equal size.
  static Split split(const SkinnyGemm& p) {
    const size_t most_bytes = most_shared_bytes() - kStaticBytes;
    const int of_warp = chunks_of_warp(p.k);
    const int rows = kOutputs + static_cast<int>(p.rows);
    for (int most = kMostOfStage;; most /= 2) {
      const int least = (of_warp + most - 1) / most;
      const Split split{of_warp, (of_warp + least - 1) / least, std::min(least, kMostStages), rows};
      if (most == 1 || shared_bytes(split) <= most_bytes) return split;
    }
  }
};

// The stages of one warp in shared memory. The rows are those of w and of x. Vector v of row r lies
// at v, or at v ^ 4 if r is odd and rows have a multiple of 128 bytes, so that the lanes that read
// a chunk of two neighbouring rows meet all banks.
template <int kOutputTiles, int kRowTiles, bool kVectors>
class Stages {
  using S = Sizes<kOutputTiles, kRowTiles>;

 public:
  __device__ Stages(const SkinnyGemm& p, const Split& split, unsigned char* shared,
                    int64_t first_tile, int warp, int lane)
      : p_(p),
        split_(split),
        shared_(shared),
        first_tile_(first_tile),
        lane_(lane),
        first_chunk_(warp * split.of_warp),
        flip_(split.of_stage % 2 == 0 ? 4 : 0) {
    const int all = (static_cast<int>(p.k) + kChunk - 1) / kChunk;
    chunks_ = max(0, min(split.of_warp, all - first_chunk_));
  }
  // Of this warp.
  __device__ int chunks() const { return chunks_; }

  // Both copy a stage, as far as there are chunks of it.
  __device__ void copy_weights(int stage) const {
    const int channel = channel_to_copy(stage);
    if (channel < 0) return;
#pragma unroll
    for (int i = 0; i < kOutputTiles; ++i) {
      const int64_t output = (first_tile_ + i) * (p_.swiglu ? kHalf : kTileOutputs);
      const auto left = static_cast<int>(min(p_.n - output, int64_t{kTileOutputs}));
      const bf16* low = p_.w.row(output) + channel;
      const int64_t to_high = p_.swiglu ? p_.n : kHalf;
      copy_rows<kHalf>(stage, kTileOutputs * i, channel, low, p_.w.stride, left);
      copy_rows<kHalf>(stage, kTileOutputs * i + kHalf, channel, low + to_high * p_.w.stride,
                       p_.w.stride, p_.swiglu ? left : left - kHalf);
    }
  }
  __device__ void copy_x(int stage) const {
    const int channel = channel_to_copy(stage);
    if (channel < 0) return;
    const auto rows = static_cast<int>(p_.rows);
#pragma unroll 1
    for (int first = 0; first < rows; first += kTileRows) {
      copy_rows<kTileRows>(stage, S::kOutputs + first, channel, p_.x.row(first) + channel,
                           p_.x.stride, rows - first, /*zeros=*/false);
    }
  }

  // Puts the RMSNorm of this warp's share of the row of x to where copy_x() would put x. Every
  // thread of the block calls it; all stages of all warps are in shared memory. `weights` is what
  // norm_weights() has returned.
  __device__ void normalise_x(float (&squares)[kWarps][S::kRows], int warp,
                              const Eight& weights) const {
    const int vectors = kChunkVectors * chunks_;
    const Eight first = lane_ < vectors ? of_share(p_.x.data, lane_) : Eight{};
    const auto x = [&](int v) { return v == lane_ ? first : of_share(p_.x.data, v); };
    const float sum = sum_squares(vectors, lane_, x);
    if (lane_ == 0) squares[warp][0] = sum;
    __syncthreads();
    const float factor = inverse_rms(squares, 0, p_);
    for (int v = lane_; v < vectors; v += 32) {
      const Eight y = normalise(x(v), v == lane_ ? weights : of_share(p_.norm_w, v), factor);
      store_eight(place(S::kOutputs, v), y);
    }
    __syncwarp();
  }
  // The first eight weights of the norm that this lane needs.
  __device__ Eight norm_weights() const {
    return lane_ < kChunkVectors * chunks_ ? of_share(p_.norm_w, lane_) : Eight{};
  }

  // Reads a stage. The lanes of a chunk's row have eight of its channels each.
  class Reader {
   public:
    __device__ Reader(const Stages& of, int stage)
        : row_bytes_(16 * kChunkVectors * of.split_.of_stage),
          last_x_(static_cast<int>(of.p_.rows) - 1),
          flip_bytes_(16 * of.flip_),
          first_(of.shared_ + stage % of.split_.stages * of.split_.rows * row_bytes_ +
                 16 * (of.lane_ % 4)) {
      // Rows g and g + 8 of all tiles are odd or even alike.
      const int g = of.lane_ / 4;
      even_ = first_ + g * row_bytes_ + g % 2 * flip_bytes_;
      odd_ = first_ + g * row_bytes_ - g % 2 * flip_bytes_;
    }
    // Of row g of half a tile.
    __device__ Eight load_w(int chunk, int tile, int half) const {
      return load_eight((chunk % 2 == 0 ? even_ : odd_) +
                        (kTileOutputs * tile + kHalf * half) * row_bytes_ + kChunkBytes * chunk);
    }
    // Of row `row` of x; rows beyond the last are like it, and what comes of them is not stored.
    __device__ Eight load_x(int chunk, int row) const {
      const int at = min(row, last_x_);
      const int flipped = at % 2 * flip_bytes_;
      return load_eight(first_ + (S::kOutputs + at) * row_bytes_ + kChunkBytes * chunk +
                        (chunk % 2 == 0 ? flipped : -flipped));
    }

   private:
    static constexpr int kChunkBytes = 16 * kChunkVectors;
    int row_bytes_, last_x_, flip_bytes_;
    const unsigned char* first_;
    const unsigned char* even_;  // of the row's even chunks, as if the row began there
    const unsigned char* odd_;
  };

 private:
  static constexpr int kLanes = S::kMostOfStage * kChunkVectors;  // that copy one row

  // Vector v of the warp's share of a row.
  __device__ Eight of_share(const bf16* row, int v) const {
    return load_eight<kVectors>(row, kChunk * first_chunk_ + 8 * v, static_cast<int>(p_.k));
  }
  // The first of the eight channels that this lane copies of each row; negative: none.
  __device__ int channel_to_copy(int stage) const {
    const int begin = stage * split_.of_stage;
    const int vector = lane_ % kLanes;
    if (vector >= kChunkVectors * min(split_.of_stage, chunks_ - begin)) return -1;
    return (first_chunk_ + begin) * kChunk + 8 * vector;
  }
  // Copies kCount rows of a stage, of which `from` is the first; zeros for those that `left` does
  // not count, or nothing.
  template <int kCount>
  __device__ void copy_rows(int stage, int first, int channel, const bf16* from, int64_t stride,
                            int left, bool zeros = true) const {
    constexpr int kAtOnce = 32 / kLanes;
    const int mine = lane_ / kLanes;
    from += mine * stride;
#pragma unroll
    for (int row = 0; row < kCount; row += kAtOnce) {
      if (row + mine < (zeros ? kCount : left)) {
        copy_vector(address(stage, first + row + mine, lane_ % kLanes), from, channel,
                    row + mine < left);
      }
      from += kAtOnce * stride;
    }
  }
  // Eight channels from `channel` on, which `from` points to.
  __device__ void copy_vector(unsigned char* to, const bf16* from, int channel, bool valid) const {
    const int channels = static_cast<int>(p_.k);
    if constexpr (kVectors) {
      cp_async16(shared_address(to), from, valid && channel < channels);
    } else {
      const Eight x = valid ? load_eight<false>(from - channel, channel, channels) : Eight{};
      store_eight(to, x);
    }
  }
  // Vector v of the warp's share of a row, with all stages in shared memory.
  __device__ unsigned char* place(int row, int v) const {
    const int of_row = kChunkVectors * split_.of_stage;
    return address(v / of_row, row, v % of_row);
  }
  __device__ unsigned char* address(int stage, int row, int vector) const {
    const int first = (stage % split_.stages * split_.rows + row) * split_.of_stage;
    return shared_ + 16 * (kChunkVectors * first + (vector ^ (row % 2 * flip_)));
  }

  const SkinnyGemm& p_;
  const Split& split_;
  unsigned char* shared_;
  int64_t first_tile_;
  int lane_;
  int first_chunk_, chunks_;
  int flip_;
};

// A block computes kOutputTiles tiles of 16 products of up to 8 kRowTiles rows with rows of w. Its
// warps share the channels, and their sums are added in the order of the warps.
//
// kResident blocks have registers on a multiprocessor.
template <int kOutputTiles, int kRowTiles, bool kVectors, int kResident>
__global__ void __launch_bounds__(kThreads, kResident)
    skinny_gemm_kernel(const __grid_constant__ SkinnyGemm p, const __grid_constant__ Split split) {
  using S = Sizes<kOutputTiles, kRowTiles>;
  __shared__ float squares[kWarps][S::kRows];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int q = lane % 4;
  const int rows = static_cast<int>(p.rows);
  const unsigned warp_bytes = S::warp_bytes(split);
  const int64_t first_tile = int64_t{blockIdx.x} * kOutputTiles;
  using MyStages = Stages<kOutputTiles, kRowTiles, kVectors>;
  const MyStages stages(p, split, memory + warp * warp_bytes, first_tile, warp, lane);
  let_next_kernel_begin();
#pragma unroll 1
  for (int stage = 0; stage < S::kMostStages; ++stage) {
    if (stage < split.stages) stages.copy_weights(stage);
    cp_async_commit();
  }
  const bool norms = p.norm_w != nullptr;
  const Eight norm_weights = norms ? stages.norm_weights() : Eight{};
  wait_for_previous_kernel();
  // The norm does not wait for the weights of the product.
  if (norms) stages.normalise_x(squares, warp, norm_weights);
#pragma unroll 1
  for (int stage = 0; stage < S::kMostStages; ++stage) {
    if (stage < split.stages && !norms) stages.copy_x(stage);
    cp_async_commit();
  }

  // At the end a thread adds up the warps' sums of every 16th row, and what is added to them, which
  // arrives meanwhile.
  const int tile_output = static_cast<int>(threadIdx.x) % kTileOutputs;
  const int first_row = static_cast<int>(threadIdx.x) / kTileOutputs;
  constexpr int kAtOnce = kThreads / kTileOutputs;
  constexpr int kRounds = (S::kRows + kAtOnce - 1) / kAtOnce;
  float residual[kRounds];
  const auto load_residuals = [&](int tile) {
    const int64_t output = (first_tile + tile) * kTileOutputs + tile_output;
#pragma unroll
    for (int i = 0; i < kRounds; ++i) {
      residual[i] = load_residual(p, first_row + kAtOnce * i, output);
    }
  };
  load_residuals(0);
  float sums[kOutputTiles][kRowTiles][4] = {};
  const int chunks = stages.chunks();
  for (int stage = 0, begin = 0; begin < chunks; ++stage, begin += split.of_stage) {
    cp_async_wait<S::kMostStages - 1>();
    __syncwarp();  // the other lanes have waited too
    const typename MyStages::Reader reader(stages, stage);
    const int count = min(split.of_stage, chunks - begin);
#pragma unroll(kRowTiles == 1 ? 4 : 1)
    for (int chunk = 0; chunk < count; ++chunk) {
      Eight x[kRowTiles];
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) x[j] = reader.load_x(chunk, kTileRows * j + g);
#pragma unroll
      for (int i = 0; i < kOutputTiles; ++i) {
        const Eight low = reader.load_w(chunk, i, 0);
        const Eight high = reader.load_w(chunk, i, 1);
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) multiply_chunk(sums[i][j], low, high, x[j]);
      }
    }
    __syncwarp();  // the other lanes have read the stage too
    if (!split.holds_all()) {
      stages.copy_weights(stage + split.stages);
      stages.copy_x(stage + split.stages);
    }
    cp_async_commit();
  }
  cp_async_wait<0>();

  const auto sums_of = [&](int from) {
    return reinterpret_cast<float*>(memory + from * warp_bytes);
  };
  const auto sum_over_warps = [&](int output, int row) {
    float sum = 0.0f;
#pragma unroll
    for (int from = 0; from < kWarps; ++from) sum += sums_of(from)[output * S::kStride + row];
    return sum;
  };
#pragma unroll
  for (int i = 0; i < kOutputTiles; ++i) {
    if (i == 0) {
      __syncwarp();  // all lanes have read the last stage
    } else {
      __syncthreads();  // all threads have read the sums of the tile before
    }
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* to = sums_of(warp) + (8 * half + g) * S::kStride + kTileRows * j + 2 * q;
        to[0] = sums[i][j][2 * half];
        to[1] = sums[i][j][2 * half + 1];
      }
    }
    __syncthreads();
    const int64_t tile = first_tile + i;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int row = first_row + kAtOnce * round;
      if (row >= rows) break;
      const float sum = p.alpha * sum_over_warps(tile_output, row);
      if (!p.swiglu) {
        store_output(p, row, tile * kTileOutputs + tile_output, sum + residual[round]);
      } else if (tile_output < kHalf) {
        const float value = p.alpha * sum_over_warps(tile_output + kHalf, row);
        store_output(p, row, tile * kHalf + tile_output, swiglu(p, sum, value));
      }
    }
    if (i + 1 < kOutputTiles) load_residuals(i + 1);
  }
}

// The RMSNorm of one row by each block, with the bits of Stages::normalise_x().
template <bool kVectors>
__global__ void __launch_bounds__(kThreads)
    skinny_gemm_norm_kernel(const __grid_constant__ SkinnyGemm p, int of_warp) {
  __shared__ float squares[kWarps][1];
  Stamps stamps;
  stamps.take(0);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto k = static_cast<int>(p.k);
  const int first = warp * of_warp * kChunk;
  const int vectors = (min(of_warp * kChunk, k - first) + 7) / 8;
  let_next_kernel_begin();
  const bf16* x = p.x.row(blockIdx.x);
  const auto load = [&](const bf16* row, int v) {
    return load_eight<kVectors>(row, first + 8 * v, k);
  };
  // Most rows are short enough that a lane has one vector at most.
  const Eight first_weight = lane < vectors ? load(p.norm_w, lane) : Eight{};
  wait_for_previous_kernel();
  stamps.take(1);
  const Eight first_input = lane < vectors ? load(x, lane) : Eight{};
  const auto input = [&](int v) { return v == lane ? first_input : load(x, v); };
  const float sum = sum_squares(vectors, lane, input);
  stamps.take(2);
  if (lane == 0) squares[warp][0] = sum;
  __syncthreads();
  const float factor = inverse_rms(squares, 0, p);
  stamps.take(3);
  for (int v = lane; v < vectors; v += 32) {
    const Eight y = normalise(input(v), v == lane ? first_weight : load(p.norm_w, v), factor);
    bf16* to = p.normed.row(blockIdx.x) + first + 8 * v;
    if constexpr (kVectors) {
      store_eight(to, y);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t bits = y.pair[i / 2] >> (16 * (i % 2)) & 0xffff;
        if (first + 8 * v + i < k) to[i] = __ushort_as_bfloat16(static_cast<unsigned short>(bits));
      }
    }
  }
  stamps.take(4);
  stamps.take(5);
  if (threadIdx.x == 0) stamps.keep(1, p.k);
}

SkinnyGemm normalised(cudaStream_t stream, const SkinnyGemm& p, bool vectors) {
  write_stamps_at_exit("skinny_gemm_norm");
  launch_early("skinny_gemm_norm", p.early, stream,
               vectors ? skinny_gemm_norm_kernel<true> : skinny_gemm_norm_kernel<false>,
               {.grid = dim3(static_cast<unsigned>(p.rows)), .threads = kThreads}, p,
               chunks_of_warp(p.k));
  SkinnyGemm y = p;
  y.x = {p.normed.data, p.normed.stride};
  y.norm_w = nullptr;
  return y;
}

template <int kOutputTiles, int kRowTiles, bool kVectors, int kResident>
void launch(cudaStream_t stream, const SkinnyGemm& p) {
  using S = Sizes<kOutputTiles, kRowTiles>;
  const Split split = S::split(p);
  if (p.norm_w != nullptr && (p.rows > 1 || !split.holds_all())) {
    const SkinnyGemm after_norm = normalised(stream, p, kVectors);
    return launch<kOutputTiles, kRowTiles, kVectors, kResident>(stream, after_norm);
  }
  launch_early("skinny_gemm", p.early, stream,
               skinny_gemm_kernel<kOutputTiles, kRowTiles, kVectors, kResident>,
               {.grid = dim3(blocks(p.n, S::kOutputs / (p.swiglu ? 2 : 1))),
                .threads = kThreads,
                .shared_bytes = S::shared_bytes(split)},
               p, split);
}

void launch_up_to_8(cudaStream_t stream, const SkinnyGemm& p, bool vectors) {
  if (!vectors) return launch<1, 1, false, 2>(stream, p);
  if (gemv(stream, p)) return;
  if (p.rows <= 2 && prefers_two_tiles(p)) return launch<2, 1, true, 2>(stream, p);
  if (p.rows > 1 && p.k >= kFewestForFour) return launch<1, 1, true, 4>(stream, p);
  launch<1, 1, true, 2>(stream, p);
}

void launch_up_to_64(cudaStream_t stream, const SkinnyGemm& p, bool vectors) {
  static_assert(kSkinnyRows == 64);
  if (!vectors) {
    if (p.rows <= 16) return launch<1, 2, false, 1>(stream, p);
    if (p.rows <= 32) return launch<1, 4, false, 1>(stream, p);
    return launch<1, 8, false, 1>(stream, p);
  }
  if (p.k % kChunk == 0 && p.rows * p.x.stride <= INT32_MAX) {
    return skinny_gemm_wide(stream, p.norm_w == nullptr ? p : normalised(stream, p, vectors));
  }
  launch<1, 8, true, 1>(stream, p);  // rare, so for any number of rows
}

}  // namespace

void skinny_gemm(cudaStream_t stream, const SkinnyGemm& p) {
  if (p.rows == 0 || p.n == 0) return;
  if (p.rows > kSkinnyRows || p.k > INT32_MAX / 2) {
    throw_invalid_argument("skinny_gemm: %lld rows of %lld channels; at most %d rows",
                           static_cast<long long>(p.rows), static_cast<long long>(p.k),
                           static_cast<int>(kSkinnyRows));
  }
  const bool vectors =
      p.k % 8 == 0 && vectors_fit<8>(p.x, p.w, p.norm_w) && vectors_fit<8>(p.normed);
  p.rows <= 8 ? launch_up_to_8(stream, p, vectors) : launch_up_to_64(stream, p, vectors);
}

}  // namespace sbtrain::kernels
