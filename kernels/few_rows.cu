#include "kernels/few_rows.h"
#include "kernels/pack.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/primitives/mma.cuh"

namespace sbtrain::kernels {

extern __shared__ __align__(128) unsigned char memory[];

namespace {

// The matrix is read once for little arithmetic, so what counts is that its bytes never stop
// coming. Each warp copies its part of w to shared memory, before it waits for the kernel in front:
// while that kernel and those before it compute, the weights of the next ones arrive, as many as
// the shared memory of all multiprocessors holds.

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileOutputs = 16;  // rows of w in one mma
constexpr int kHalf = 8;          // of them; with swiglu the gates, then the values
constexpr int kTileRows = 8;      // rows of x in one mma
constexpr int kChunk = 32;        // channels of two mma
constexpr int kChunkVectors = 4;  // of 8 channels, 16 bytes
// Blocks compute fewer outputs rather than leave more than half of the multiprocessors of an H200
// idle.
constexpr int64_t kFewestBlocks = 64;
// Up to this many channels, two blocks with two tiles of outputs each fit a multiprocessor.
constexpr int64_t kMostForTwoTiles = 6 * kChunk * kWarps;

// Eight neighbouring channels of one row, bf16. Lane q of four has channels 8q to 8q+7 of a chunk.
// The products of a chunk take them in the order of the lanes, which is the same for x and w.
struct Eight {
  uint32_t pair[4];
};

// Zeros beyond the last channel: what lies there may be NaN.
template <bool kVectors>
__device__ __forceinline__ Eight load_eight(const bf16* row, int channel, int channels) {
  Eight x{};
  if constexpr (kVectors) {
    if (channel < channels) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(row + channel);
      x = {{loaded.x, loaded.y, loaded.z, loaded.w}};
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = channel + i < channels ? __bfloat16_as_ushort(row[channel + i]) : 0;
      x.pair[i / 2] |= bits << (16 * (i % 2));
    }
  }
  return x;
}

// The products of one chunk: 16 outputs, whose first and last 8 rows of w are `low` and `high`.
__device__ __forceinline__ void multiply_chunk(float (&sums)[4], const Eight& low,
                                               const Eight& high, const Eight& x) {
  mma_m16n8k16_bf16(sums, {low.pair[0], high.pair[0], low.pair[1], high.pair[1]}, x.pair[0],
                    x.pair[1]);
  mma_m16n8k16_bf16(sums, {low.pair[2], high.pair[2], low.pair[3], high.pair[3]}, x.pair[2],
                    x.pair[3]);
}

// x * w, rounded to bf16.
__device__ __forceinline__ Eight weigh(const Eight& x, const Eight& w) {
  Eight y;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 product = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x.pair[i]),
                                           *reinterpret_cast<const __nv_bfloat162*>(&w.pair[i]));
    y.pair[i] = *reinterpret_cast<const uint32_t*>(&product);
  }
  return y;
}

// Adds the products of the rows of two tiles with themselves: sums (g, g) and (g + 8, g) of an mma
// become the squares of rows g of tile j, for even and odd j. x is both of its matrices.
__device__ __forceinline__ void add_squares(float (&sums)[4], int j, const Eight& x) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    if (j % 2 == 0) {
      mma_m16n8k16_bf16(sums, {x.pair[i], 0, x.pair[i + 1], 0}, x.pair[i], x.pair[i + 1]);
    } else {
      mma_m16n8k16_bf16(sums, {0, x.pair[i], 0, x.pair[i + 1]}, x.pair[i], x.pair[i + 1]);
    }
  }
}

// What is added to an output; 0 beyond the last row and output.
__device__ __forceinline__ float load_residual(const FewRows& p, int64_t row, int64_t output) {
  if (p.residual.data == nullptr || row >= p.rows || output >= p.n) return 0.0f;
  const int64_t at = row * p.residual.stride + output;
  return p.type == Type::kF32 ? static_cast<const float*>(p.residual.data)[at]
                              : to_float(static_cast<const bf16*>(p.residual.data)[at]);
}

__device__ __forceinline__ void store_output(const FewRows& p, int64_t row, int64_t output,
                                             float y) {
  if (output >= p.n) return;
  const int64_t at = row * p.y.stride + output;
  if (p.type == Type::kF32) {
    static_cast<float*>(p.y.data)[at] = y;
  } else {
    static_cast<bf16*>(p.y.data)[at] = __float2bfloat16_rn(y);
  }
}

__device__ __forceinline__ float swiglu(const FewRows& p, float gate, float value) {
  if (p.type != Type::kF32) {
    gate = to_float(__float2bfloat16_rn(gate));
    value = to_float(__float2bfloat16_rn(value));
  }
  return value * (gate * __fdividef(1.0f, 1.0f + __expf(-gate)));
}

// How the channels of a matrix are shared: warp i has the chunks [i * of_warp, (i + 1) * of_warp),
// as far as there are any. A stage is what a warp copies at once.
struct Split {
  int of_warp;
  int of_stage;
  int stages;  // in shared memory
};

template <int kOutputTiles, int kRowTiles>
struct Sizes {
  static constexpr int kMostStages = kOutputTiles == 4 ? 3 : 2;
  static constexpr int kMostOfStage = kRowTiles == 1 ? 8 : 8 / kOutputTiles;  // chunks
  static constexpr int kOutputs = kTileOutputs * kOutputTiles;
  static constexpr int kStageRows = kOutputs + 1;  // the last one holds the weights of the norm
  static constexpr int kRows = kTileRows * kRowTiles;
  static constexpr int kStride = kRows + (kRowTiles > 1 ? 8 : 0);  // without bank conflicts
  static constexpr int kSumBytes = kTileOutputs * kStride * 4;     // of one tile and warp

  static size_t shared_bytes(const Split& split) { return size_t{kWarps} * warp_bytes(split); }
  __host__ __device__ static unsigned warp_bytes(const Split& split) {
    const int bytes = split.stages * kStageRows * split.of_stage * kChunk * 2;
    return static_cast<unsigned>(bytes > kSumBytes ? bytes : kSumBytes);
  }
  // The largest stages that fit, and of equal size.
  static Split split(int64_t k, size_t most_bytes) {
    const auto of_warp = static_cast<int>(ceil_div(ceil_div(k, kChunk), kWarps));
    for (int most = kMostOfStage;; most /= 2) {
      const int least = (of_warp + most - 1) / most;
      const Split split{of_warp, (of_warp + least - 1) / least, std::min(least, kMostStages)};
      if (most == 1 || shared_bytes(split) <= most_bytes) return split;
    }
  }
};

// What a warp copies of w and norm_w, in shared memory. Vector v of row r lies at v, or at v ^ 4 if
// r is odd and rows have a multiple of 128 bytes, so that the lanes that read a chunk of two
// neighbouring rows meet all banks.
template <int kOutputTiles, int kRowTiles, bool kVectors>
class Weights {
  using S = Sizes<kOutputTiles, kRowTiles>;

 public:
  __device__ Weights(const FewRows& p, const Split& split, unsigned char* shared,
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
  // The first that this lane has of a chunk.
  __device__ int channel(int chunk) const {
    return (first_chunk_ + chunk) * kChunk + 8 * (lane_ % 4);
  }

  // Copies stage `stage`, as far as there are chunks of it, and ends a group of copies.
  __device__ void copy(int stage) const {
    constexpr int kLanes = S::kMostOfStage * kChunkVectors;  // of one row
    const int begin = stage * split_.of_stage;
    const int vector = lane_ % kLanes;
    const int channel = (first_chunk_ + begin) * kChunk + 8 * vector;
    if (vector < kChunkVectors * min(split_.of_stage, chunks_ - begin)) {
      for (int i = 0; i < kOutputTiles; ++i) {
        const int64_t tile = first_tile_ + i;
        const int64_t output = tile * (p_.swiglu ? kHalf : kTileOutputs);
        const auto left = static_cast<int>(min(p_.n - output, int64_t{kTileOutputs}));
        const bf16* low = p_.w.row(output) + channel;
        const int64_t to_high = p_.swiglu ? p_.n : kHalf;
        copy_half<kLanes>(stage, kTileOutputs * i, vector, channel, low, left);
        copy_half<kLanes>(stage, kTileOutputs * i + kHalf, vector, channel,
                          low + to_high * p_.w.stride, p_.swiglu ? left : left - kHalf);
      }
      if (p_.norm_w != nullptr && lane_ < kLanes) {
        copy_vector(address(stage, S::kOutputs, vector), p_.norm_w + channel, channel);
      }
    }
    cp_async_commit();
  }
  // Reads a stage. The lanes of a chunk's row have eight of its channels each.
  class Stage {
   public:
    __device__ Stage(const Weights& w, int stage)
        : row_bytes_(16 * kChunkVectors * w.split_.of_stage),
          norm_(w.address(stage, S::kOutputs, w.lane_ % 4)) {
      // Rows g and g + 8 of all tiles are odd or even alike.
      const int flipped = 16 * (w.lane_ / 4 % 2 * w.flip_);
      const unsigned char* row =
          w.shared_ + 16 * (w.lane_ % 4) +
          (stage % w.split_.stages * S::kStageRows + w.lane_ / 4) * row_bytes_;
      even_ = row + flipped;
      odd_ = row - flipped;
    }
    // Of row g of half a tile.
    __device__ Eight load(int chunk, int tile, int half) const {
      return load_vector((chunk % 2 == 0 ? even_ : odd_) +
                         (kTileOutputs * tile + kHalf * half) * row_bytes_ + kChunkBytes * chunk);
    }
    __device__ Eight load_norm(int chunk) const { return load_vector(norm_ + kChunkBytes * chunk); }

   private:
    static constexpr int kChunkBytes = 16 * kChunkVectors;
    static __device__ Eight load_vector(const unsigned char* from) {
      const uint4 x = *reinterpret_cast<const uint4*>(from);
      return {{x.x, x.y, x.z, x.w}};
    }
    int row_bytes_;
    const unsigned char* norm_;
    const unsigned char* even_;  // of the row's even chunks, as if the row began there
    const unsigned char* odd_;
  };

 private:
  // Rows [first, first + 8) of a stage, of which `from` is the first; zeros for those that `left`
  // does not count.
  template <int kLanes>
  __device__ void copy_half(int stage, int first, int vector, int channel, const bf16* from,
                            int left) const {
    constexpr int kAtOnce = 32 / kLanes;
    const int mine = lane_ / kLanes;
    from += mine * p_.w.stride;
#pragma unroll
    for (int row = 0; row < kHalf; row += kAtOnce) {
      copy_vector(address(stage, first + row + mine, vector), from, channel, row + mine < left);
      from += kAtOnce * p_.w.stride;
    }
  }
  // Eight channels from `channel` on, which `from` points to.
  __device__ void copy_vector(unsigned char* to, const bf16* from, int channel,
                              bool valid = true) const {
    const int channels = static_cast<int>(p_.k);
    if constexpr (kVectors) {
      cp_async16(shared_address(to), from, valid && channel < channels);
    } else {
      const Eight x = valid ? load_eight<false>(from - channel, channel, channels) : Eight{};
      *reinterpret_cast<uint4*>(to) = {x.pair[0], x.pair[1], x.pair[2], x.pair[3]};
    }
  }
  __device__ unsigned char* address(int stage, int row, int vector) const {
    const int first = (stage % split_.stages * S::kStageRows + row) * split_.of_stage;
    return shared_ + 16 * (kChunkVectors * first + (vector ^ (row % 2 * flip_)));
  }

  const FewRows& p_;
  const Split& split_;
  unsigned char* shared_;
  int64_t first_tile_;
  int lane_;
  int first_chunk_, chunks_;
  int flip_;
};

// A block computes kOutputTiles tiles of 16 products of up to 8 kRowTiles rows with rows of w. Its
// warps share the channels, and their sums are added in the order of the warps. A warp holds the x
// of kHeld stages, all of which arrive at once.
template <int kOutputTiles, int kRowTiles, int kHeld, bool kVectors>
__global__ void __launch_bounds__(kThreads, kRowTiles > 1 ? 1 : 2)
    few_rows_kernel(const __grid_constant__ FewRows p, const __grid_constant__ Split split) {
  using S = Sizes<kOutputTiles, kRowTiles>;
  constexpr bool kMore = kRowTiles > 1 || kHeld > 1;  // than one stage, perhaps
  __shared__ float squares_of[kWarps][S::kRows];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int q = lane % 4;
  const int rows = static_cast<int>(p.rows);
  const unsigned warp_bytes = S::warp_bytes(split);
  const int64_t first_tile = int64_t{blockIdx.x} * kOutputTiles;
  using W = Weights<kOutputTiles, kRowTiles, kVectors>;
  const W w(p, split, memory + warp * warp_bytes, first_tile, warp, lane);
  let_next_kernel_begin();
#pragma unroll
  for (int stage = 0; stage < (kMore ? S::kMostStages : 1); ++stage) w.copy(stage);
  wait_for_previous_kernel();

  const int chunks = w.chunks();
  const int left_of_x = min(static_cast<int>(p.k) - w.channel(0), kChunk * chunks - 8 * q);
  const auto load_x = [&](Eight(&x)[kRowTiles], int chunk) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int row = kTileRows * j + g;
      x[j] = load_eight<kVectors>(p.x.row(row) + w.channel(0), kChunk * chunk,
                                  row < rows ? left_of_x : 0);
    }
  };
  // One tile of rows: all chunks of the first kHeld stages. Several: one chunk.
  constexpr int kOfStage = kRowTiles == 1 ? S::kMostOfStage : 1;
  Eight x[kHeld][kOfStage][kRowTiles];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
#pragma unroll
    for (int c = 0; c < kOfStage; ++c) load_x(x[h][c], h * split.of_stage + c);
  }
  // At the end a thread adds up the warps' sums of every 16th row. What it adds to the first of
  // them arrives meanwhile.
  const int tile_output = static_cast<int>(threadIdx.x) % kTileOutputs;
  const int first_row = static_cast<int>(threadIdx.x) / kTileOutputs;
  float residual[kOutputTiles];
#pragma unroll
  for (int i = 0; i < kOutputTiles; ++i) {
    residual[i] = load_residual(p, first_row, (first_tile + i) * kTileOutputs + tile_output);
  }
  float sums[kOutputTiles][kRowTiles][4] = {};
  float squares[(kRowTiles + 1) / 2][4] = {};
  const auto multiply = [&](const auto& stage, int chunk, Eight(&x)[kRowTiles]) {
    if (p.norm_w != nullptr) {
      const Eight norm = stage.load_norm(chunk);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        add_squares(squares[j / 2], j, x[j]);
        x[j] = weigh(x[j], norm);
      }
    }
#pragma unroll
    for (int i = 0; i < kOutputTiles; ++i) {
      const Eight low = stage.load(chunk, i, 0);
      const Eight high = stage.load(chunk, i, 1);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) multiply_chunk(sums[i][j], low, high, x[j]);
    }
  };
  for (int stage = 0; stage * split.of_stage < chunks;) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int begin = stage * split.of_stage;
      const int end = min(begin + split.of_stage, chunks);
      if (begin >= end) break;
      cp_async_wait<kMore ? S::kMostStages - 1 : 0>();
      __syncwarp();  // the other lanes have waited too
      const typename W::Stage of_w(w, stage);
      if constexpr (kRowTiles == 1) {
#pragma unroll
        for (int c = 0; c < kOfStage; ++c) {
          if (begin + c < end) multiply(of_w, c, x[h][c]);
          if constexpr (kMore) load_x(x[h][c], begin + kHeld * split.of_stage + c);
        }
      } else {
#pragma unroll 1
        for (int chunk = begin; chunk < end; ++chunk) {
          Eight next[kRowTiles];
          load_x(next, chunk + 1);
          multiply(of_w, chunk - begin, x[0][0]);
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) x[0][0][j] = next[j];
        }
      }
      __syncwarp();  // the other lanes have read the stage too
      if constexpr (kMore) w.copy(stage + S::kMostStages);
      ++stage;
    }
  }
  cp_async_wait<0>();

  if (p.norm_w != nullptr && q == g / 2) {  // this lane has the sums (g, g) and (g + 8, g)
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const float(&sum)[4] = squares[j / 2];
      const int tile = j % 2 * 2;
      squares_of[warp][kTileRows * j + g] = g % 2 == 0 ? sum[tile] : sum[tile + 1];
    }
  }
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
    for (int row = first_row; row < rows; row += kThreads / kTileOutputs) {
      float factor = p.alpha;
      if (p.norm_w != nullptr) {
        float all = 0.0f;
#pragma unroll
        for (int from = 0; from < kWarps; ++from) all += squares_of[from][row];
        factor *= rsqrtf(all / static_cast<float>(p.k) + p.norm_eps);
      }
      const float sum = factor * sum_over_warps(tile_output, row);
      if (!p.swiglu) {
        const int64_t output = tile * kTileOutputs + tile_output;
        const float added = row == first_row ? residual[i] : load_residual(p, row, output);
        store_output(p, row, output, sum + added);
      } else if (tile_output < 8) {
        const float value = factor * sum_over_warps(tile_output + 8, row);
        store_output(p, row, tile * 8 + tile_output, swiglu(p, sum, value));
      }
    }
  }
}

template <int kOutputTiles, int kRowTiles, bool kVectors, int kHeld = 1>
void launch(cudaStream_t stream, const FewRows& p) {
  using S = Sizes<kOutputTiles, kRowTiles>;
  const Split split = S::split(p.k, most_shared_bytes() - sizeof(float[kWarps][S::kRows]));
  if constexpr (kRowTiles == 1 && kHeld == 1) {
    if (split.of_warp > split.of_stage) {
      return launch<kOutputTiles, kRowTiles, kVectors, 2>(stream, p);
    }
  }
  launch_early("few_rows", p.early, stream,
               few_rows_kernel<kOutputTiles, kRowTiles, kHeld, kVectors>,
               {.grid = dim3(blocks(p.n, S::kOutputs / (p.swiglu ? 2 : 1))),
                .threads = kThreads,
                .shared_bytes = S::shared_bytes(split)},
               p, split);
}

template <int kRowTiles>
void launch_rows(cudaStream_t stream, const FewRows& p, bool vectors) {
  if (!vectors) return launch<1, kRowTiles, false>(stream, p);
  // A block reads all of x, which counts once that is as much as its part of w. Fewer blocks also
  // execute fewer instructions, but one row has several of them on each multiprocessor.
  const int64_t products = p.swiglu ? 2 * p.n : p.n;
  const auto fills = [&](int tiles) { return products / (kTileOutputs * tiles) >= kFewestBlocks; };
  if constexpr (kRowTiles > 2) {
    if (fills(4)) return launch<4, kRowTiles, true>(stream, p);
  }
  if (fills(2) && (kRowTiles > 1 || p.k <= kMostForTwoTiles)) {
    return launch<2, kRowTiles, true>(stream, p);
  }
  launch<1, kRowTiles, true>(stream, p);
}

}  // namespace

void few_rows(cudaStream_t stream, const FewRows& p) {
  if (p.rows == 0 || p.n == 0) return;
  if (p.rows > kFewRows || p.k > INT32_MAX / 2) {
    throw std::invalid_argument("few_rows: " + std::to_string(p.rows) + " rows of " +
                                std::to_string(p.k) + " channels; at most " +
                                std::to_string(kFewRows) + " rows");
  }
  const bool vectors = p.k % 8 == 0 && vectors_fit<8>(p.x, p.w, p.norm_w);
  if (p.rows <= 8) return launch_rows<1>(stream, p, vectors);
  if (p.rows <= 16) return launch_rows<2>(stream, p, vectors);
  if (p.rows <= 32) return launch_rows<4>(stream, p, vectors);
  launch_rows<8>(stream, p, vectors);
}

}  // namespace sbtrain::kernels
