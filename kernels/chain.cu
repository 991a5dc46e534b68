#include <algorithm>
#include <memory>

#include "kernels/chain.h"
#include "kernels/decode.cuh"
#include "kernels/few_rows.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/grid_barrier.cuh"
#include "kernels/rope.cuh"

namespace sbtrain::kernels {

extern __shared__ __align__(128) unsigned char memory[];

namespace {

// One block on each multiprocessor stays for all links. Its warps copy the weights of all products
// to shared memory in the order in which they need them and as far ahead as there is room, whatever
// they wait for meanwhile, so that the memory never rests. Between two links the blocks wait for
// each other.

using products::Eight;
using products::kChunk;
using products::kChunkVectors;
using products::kHalf;
using products::kThreads;
using products::kTileOutputs;
using products::kTileRows;
using products::kWarps;

constexpr int kMostProducts = 200;
constexpr int kMostAttentions = 50;
constexpr int kMostRotations = 50;
constexpr int kMostLinks = kMostProducts + kMostAttentions + kMostRotations;
constexpr int kMostFrequencies = 64;  // of a rotation; all have the same

constexpr int kMostChunks = 16;  // of a warp, of which it holds the inputs in registers
constexpr int kMostNormed = 8;   // the same where it holds the weights of the norm as well
constexpr int kSlotChunks = 2;   // a slot has those of one tile: 128 bytes of each of 16 rows
constexpr int kRowBytes = 2 * kSlotChunks * kChunk;
constexpr int kSlotBytes = kTileOutputs * kRowBytes;
constexpr int kSlots = 12;     // of a warp
constexpr int kMostTiles = 4;  // that a block computes at once
constexpr int kRingBytes = kWarps * kSlots * kSlotBytes;
constexpr int kDeferringWarps = 1;
constexpr int kSumStride = kTileRows + 1;
constexpr int kSumsOfWarp = kTileOutputs * kSumStride;
constexpr int kSumsOfTile = kWarps * kSumsOfWarp;
constexpr int kSharedBytes =
    kRingBytes + kMostTiles * kSumsOfTile * static_cast<int>(sizeof(float));

// A product with what fits 32 bits. Its tiles go round the blocks, beginning with block `first`,
// which is where those of the product before have ended.
struct Product {
  void* y;
  const bf16* x;
  const bf16* w;
  const void* residual;
  const bf16* norm_w;
  int32_t y_stride, x_stride, w_stride, residual_stride;
  int32_t n, k;
  float alpha, norm_eps;
  uint32_t first;
  Type type;
  bool swiglu;

  __device__ int tiles() const { return n / (swiglu ? kHalf : kTileOutputs); }
  // How many tiles a block computes at once from its tile `tile` on.
  __device__ int tiles_from(unsigned tile) const {
    const unsigned left = static_cast<unsigned>(tiles()) - tile;
    return min(kMostTiles, static_cast<int>((left + gridDim.x - 1) / gridDim.x));
  }
  __device__ unsigned first_tile() const {
    return blockIdx.x >= first ? blockIdx.x - first : blockIdx.x + gridDim.x - first;
  }
  // Of the share of each warp.
  __device__ int of_warp() const {
    const int chunks = (k + kChunk - 1) / kChunk;
    return (chunks + kWarps - 1) / kWarps;
  }
  __device__ int chunks(int warp) const {
    return max(0, min(of_warp(), (k + kChunk - 1) / kChunk - warp * of_warp()));
  }
  __device__ int slots() const { return (of_warp() + kSlotChunks - 1) / kSlotChunks; }
  __device__ FewRows few_rows(int rows) const {
    FewRows p{};
    p.type = type;
    p.y = {y, y_stride};
    p.residual = {residual, residual_stride};
    p.rows = rows;
    p.n = n;
    p.k = k;
    p.alpha = alpha;
    p.norm_eps = norm_eps;
    return p;
  }
};

struct Rotation {
  bf16* x;
  const int32_t* positions;
  int32_t stride, heads, half;  // half of the channels of a head
};

enum class LinkKind : uint8_t { kProduct, kAttention, kRotation };

template <typename Attention>
struct Program {
  int32_t* count;
  const int32_t* lengths;
  int32_t links, products, rows;
  Product product[kMostProducts];
  Attention attention[kMostAttentions];
  int32_t parts[kMostAttentions];  // that a head of a sequence is divided into
  Rotation rotation[kMostRotations];
  double turns[kMostFrequencies];
  LinkKind kind[kMostLinks];
};

// What a warp copies of the weights of all products, slot by slot: the first slot of each of the
// tiles that are computed at once, then the second, ...
template <typename Attention>
class WeightStream {
 public:
  __device__ WeightStream(const Program<Attention>& program, unsigned char* ring, int warp,
                          int lane)
      : program_(program),
        warp_(warp),
        vector_(lane % (kSlotChunks * kChunkVectors)),
        row_(lane / (kSlotChunks * kChunkVectors)),
        begin_(shared_address(ring)),
        to_(0) {
    tile_ = program.products > 0 ? program.product[0].first_tile() : 0;
    find_tile();
  }
  // Copies the next slot, if there is one, as a group of its own.
  __device__ void copy_next() {
    if (product_ < program_.products) {
      const bool valid = slot_ * kSlotChunks + vector_ / kChunkVectors < chunks_;
      const bf16* const from = from_ + of_tiles_ * to_tile_;
      const uint32_t to = begin_ + to_ + row_ * kRowBytes + 16 * (vector_ ^ (row_ % 2 * 4));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kHalf / kRowsAtOnce; ++i) {
          cp_async16(to + (kHalf * half + kRowsAtOnce * i) * kRowBytes,
                     from + half * to_high_ + i * to_next_, valid);
        }
      }
      to_ = to_ + kSlotBytes == kSlots * kSlotBytes ? 0 : to_ + kSlotBytes;
      if (++of_tiles_ == tiles_) {
        of_tiles_ = 0;
        from_ += kSlotChunks * kChunk;
        if (++slot_ == slots_) {
          tile_ += tiles_ * gridDim.x;
          find_tile();
        }
      }
    }
    cp_async_commit();
  }

 private:
  static constexpr int kRowsAtOnce = 32 / (kSlotChunks * kChunkVectors);

  // Goes to the next product that has the tile, or to the end.
  __device__ void find_tile() {
    while (product_ < program_.products &&
           tile_ >= static_cast<unsigned>(program_.product[product_].tiles())) {
      if (++product_ < program_.products) tile_ = program_.product[product_].first_tile();
    }
    if (product_ == program_.products) return;
    const Product& p = program_.product[product_];
    const int of_warp = p.of_warp();
    const int64_t row = int64_t{tile_} * (p.swiglu ? kHalf : kTileOutputs) + row_;
    from_ = p.w + row * p.w_stride + warp_ * of_warp * kChunk + 8 * vector_;
    to_high_ = int64_t{p.swiglu ? p.n : kHalf} * p.w_stride;
    to_next_ = int64_t{kRowsAtOnce} * p.w_stride;
    to_tile_ = int64_t{gridDim.x} * (p.swiglu ? kHalf : kTileOutputs) * p.w_stride;
    tiles_ = p.tiles_from(tile_);
    slot_ = 0;
    slots_ = p.slots();
    chunks_ = p.chunks(warp_);
  }

  const Program<Attention>& program_;
  int warp_, vector_, row_;
  uint32_t begin_, to_;
  int product_ = 0;
  unsigned tile_;
  int slot_ = 0, slots_ = 0, chunks_ = 0;
  const bf16* from_ = nullptr;
  int64_t to_high_ = 0, to_next_ = 0, to_tile_ = 0;
  int tiles_ = 0, of_tiles_ = 0;  // computed at once; which of them comes next
};

// The inputs of a warp's chunks: lane 4g + q has eight channels of each chunk of row g.
class Inputs {
 public:
  // Before the inputs are there.
  __device__ void load_norm(const Product& p, int warp, int lane) {
    chunks_ = p.chunks(warp);
    first_ = warp * p.of_warp() * kChunk + 8 * (lane % 4);
    if (p.norm_w == nullptr) return;
#pragma unroll
    for (int c = 0; c < kMostNormed; ++c) {
      w_[c] = c < chunks_ ? load_eight(p.norm_w + first_ + c * kChunk) : Eight{};
    }
  }
  __device__ void load(const Product& p, int rows, int lane) {
    const bf16* row = p.x + int64_t{min(lane / 4, rows - 1)} * p.x_stride + first_;
#pragma unroll
    for (int c = 0; c < kMostChunks; ++c) {
      x_[c] = c < chunks_ ? load_eight(row + c * kChunk) : Eight{};
    }
  }
  // The bits are those of few_rows.cu, where lane v of a warp has vector v.
  __device__ void normalise(const Product& p, int rows, int warp, int lane,
                            float (&squares)[kWarps][kTileRows]) {
    float sums[kMostNormed] = {};
#pragma unroll
    for (int c = 0; c < kMostNormed; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = products::floats_of(x_[c].pair[i]);
        sums[c] = fmaf(pair.x, pair.x, sums[c]);
        sums[c] = fmaf(pair.y, pair.y, sums[c]);
      }
    }
#pragma unroll
    for (int distance = kMostNormed / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < distance; ++i) sums[i] += sums[i + distance];
    }
    float sum = sums[0];
    sum += __shfl_xor_sync(~0u, sum, 2);
    sum += __shfl_xor_sync(~0u, sum, 1);
    if (lane % 4 == 0) squares[warp][lane / 4] = sum;
    __syncthreads();
    const float factor = products::inverse_rms(squares, min(lane / 4, rows - 1), p.few_rows(rows));
#pragma unroll
    for (int c = 0; c < kMostNormed; ++c) x_[c] = products::normalise(x_[c], w_[c], factor);
  }
  __device__ const Eight& operator[](int chunk) const {
    return x_[chunk];
  }

 private:
  static __device__ Eight load_eight(const bf16* from) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    return {{x.x, x.y, x.z, x.w}};
  }
  int chunks_, first_;
  Eight x_[kMostChunks];
  Eight w_[kMostNormed];
};

// Waits until at most `pending` of this lane's slots have not arrived.
template <int kMost>
__device__ __forceinline__ void wait_for_slots(int pending) {
  if constexpr (kMost <= 0) {
    cp_async_wait<0>();
  } else if (pending >= kMost) {
    cp_async_wait<kMost>();
  } else {
    wait_for_slots<kMost - 1>(pending);
  }
}

__device__ __forceinline__ Eight load_shared(const unsigned char* from) {
  const uint4 x = *reinterpret_cast<const uint4*>(from);
  return {{x.x, x.y, x.z, x.w}};
}

template <int kLanes, typename Attention>
__global__ void __launch_bounds__(kThreads, 1)
    chain_kernel(const __grid_constant__ Program<Attention> program) {
  __shared__ float squares[kWarps][kTileRows];
  __shared__ int lengths[kTileRows];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4;
  const int q = lane % 4;
  const int rows = program.rows;
  unsigned char* const ring = memory + warp * kSlots * kSlotBytes;
  // Of row g, in the first slot: the vectors of its two chunks.
  const int even = g * kRowBytes + 16 * (q ^ (g % 2 * 4));
  const int odd = g * kRowBytes + 16 * ((q + kChunkVectors) ^ (g % 2 * 4));
  WeightStream<Attention> weights(program, ring, warp, lane);
#pragma unroll 1
  for (int i = 0; i < kSlots; ++i) weights.copy_next();

  if (program.lengths != nullptr && static_cast<int>(threadIdx.x) < rows) {
    lengths[threadIdx.x] = program.lengths[threadIdx.x];
  }
  __syncthreads();

  // At the end of the products these threads add up the warps' sums of one output of one row, of
  // every other tile.
  const int tile_output = static_cast<int>(threadIdx.x) % kTileOutputs;
  const int row = static_cast<int>(threadIdx.x) / kTileOutputs % kTileRows;
  const int first_tile = static_cast<int>(threadIdx.x) / (kTileOutputs * kTileRows);
  constexpr int kTilesAtOnce = kThreads / (kTileOutputs * kTileRows);
  float* const sums_of_tiles = reinterpret_cast<float*>(memory + kRingBytes);
  int slot = 0;      // bytes from the begin of the ring
  int deferred = 0;  // slots that this warp copies after the release of the count
  int products_done = 0;
  int attentions_done = 0;
  int rotations_done = 0;
#pragma unroll 1
  for (int link = 0; link < program.links; ++link) {
    // For the links before this one, of all blocks.
    const auto wait = [&] {
      if (threadIdx.x == 0) {
        wait_for_count(program.count, link * static_cast<int32_t>(gridDim.x));
      }
      __syncthreads();
    };
    if (program.kind[link] == LinkKind::kAttention) {
      const Attention& attention = program.attention[attentions_done];
      const int parts = program.parts[attentions_done++];
      const Decode& t = attention.p.t;
      const auto heads = static_cast<unsigned>(t.heads);
      const auto rows_of_heads = heads * static_cast<unsigned>(t.batch);
      bool waited = false;
#pragma unroll 1
      for (unsigned job = blockIdx.x; job < rows_of_heads * static_cast<unsigned>(parts);
           job += gridDim.x) {
        cached::attend_cached<kLanes, true, cached::kBatch>(
            attention,
            {static_cast<int>(job % heads), job / heads % static_cast<unsigned>(t.batch),
             lengths[job / heads % static_cast<unsigned>(t.batch)],
             static_cast<int>(job / rows_of_heads), parts},
            [&] {
              if (!waited) wait();
              waited = true;
            });
        __syncthreads();  // before the next job uses the shared memory
      }
      if (!waited) wait();
    } else if (program.kind[link] == LinkKind::kRotation) {
      const Rotation& p = program.rotation[rotations_done++];
      wait();
      const unsigned of_row = p.heads * p.half;
#pragma unroll 1
      for (unsigned task = blockIdx.x * kThreads + threadIdx.x; task < rows * of_row;
           task += gridDim.x * kThreads) {
        const unsigned row = task / of_row;
        const unsigned head = task % of_row / p.half;
        const unsigned frequency = task % p.half;
        bf16* const x = p.x + int64_t{row} * p.stride + 2 * head * p.half + frequency;
        float x1 = to_float(x[0]);
        float x2 = to_float(x[p.half]);
        rotate(rope_angle(p.positions[row], program.turns[frequency]), x1, x2);
        x[0] = __float2bfloat16_rn(x1);
        x[p.half] = __float2bfloat16_rn(x2);
      }
    } else {
      const Product& product = program.product[products_done++];
      const FewRows p = product.few_rows(rows);
      const auto tiles = static_cast<unsigned>(product.tiles());
      unsigned tile = product.first_tile();
      Inputs x;
      if (tile < tiles) x.load_norm(product, warp, lane);
      wait();
      if (tile < tiles) {
        x.load(product, rows, lane);
        if (product.norm_w != nullptr) x.normalise(product, rows, warp, lane, squares);
      }
      const int slots = product.slots();
      while (tile < tiles) {
        const int at_once = product.tiles_from(tile);
        const auto output_of = [&](int i) {
          return int64_t{tile + i * gridDim.x} * (product.swiglu ? kHalf : kTileOutputs) +
                 tile_output;
        };
        float residual[kMostTiles / kTilesAtOnce];
#pragma unroll
        for (int i = 0; i < kMostTiles / kTilesAtOnce; ++i) {
          const int of = first_tile + kTilesAtOnce * i;
          const bool has = of < at_once && row < rows;
          residual[i] = has ? products::load_residual(p, row, output_of(of)) : 0.0f;
        }
        // The release of the count waits for the copies of this warp that are under way.
        const bool defers = warp < kDeferringWarps && tile + at_once * gridDim.x >= tiles &&
                            at_once * slots <= kSlots;
        const auto multiply = [&](auto count) {
          constexpr int kTiles = decltype(count)::value;
          float sums[kTiles][4] = {};
#pragma unroll
          for (int s = 0; s < kMostChunks / kSlotChunks; ++s) {
            if (s >= slots) break;
            wait_for_slots<kSlots - kTiles>(kSlots - kTiles * (defers ? s + 1 : 1));
            __syncwarp();  // the other lanes have waited too
            int from[kTiles];
#pragma unroll
            for (int i = 0; i < kTiles; ++i) {
              from[i] = slot;
              slot = slot + kSlotBytes == kSlots * kSlotBytes ? 0 : slot + kSlotBytes;
            }
            // A tile's products wait for each other, those of different tiles do not.
#pragma unroll
            for (int c = 0; c < kSlotChunks; ++c) {
              Eight low[kTiles];
              Eight high[kTiles];
#pragma unroll
              for (int i = 0; i < kTiles; ++i) {
                const unsigned char* const at = ring + from[i] + (c == 0 ? even : odd);
                low[i] = load_shared(at);
                high[i] = load_shared(at + kHalf * kRowBytes);
              }
#pragma unroll
              for (int i = 0; i < kTiles; ++i) {
                products::multiply_first(sums[i], low[i], high[i], x[kSlotChunks * s + c]);
              }
#pragma unroll
              for (int i = 0; i < kTiles; ++i) {
                products::multiply_second(sums[i], low[i], high[i], x[kSlotChunks * s + c]);
              }
            }
            __syncwarp();  // the other lanes have read the slots too
#pragma unroll 1
            for (int i = 0; i < kTiles && !defers; ++i) weights.copy_next();
          }
          if (defers) deferred = kTiles * slots;
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            float* const mine =
                sums_of_tiles + i * kSumsOfTile + warp * kSumsOfWarp + g * kSumStride + 2 * q;
            mine[0] = sums[i][0];
            mine[1] = sums[i][1];
            mine[kHalf * kSumStride] = sums[i][2];
            mine[kHalf * kSumStride + 1] = sums[i][3];
          }
        };
        switch (at_once) {
          case 1:
            multiply(Int<1>());
            break;
          case 2:
            multiply(Int<2>());
            break;
          case 3:
            multiply(Int<3>());
            break;
          default:
            multiply(Int<kMostTiles>());
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kMostTiles / kTilesAtOnce; ++i) {
          const int of = first_tile + kTilesAtOnce * i;
          if (of >= at_once || row >= rows) continue;
          const auto sum_over_warps = [&](int tile_row) {
            const float* const from =
                sums_of_tiles + of * kSumsOfTile + tile_row * kSumStride + row;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) sum += from[w * kSumsOfWarp];
            return sum;
          };
          const float sum = p.alpha * sum_over_warps(tile_output);
          if (!product.swiglu) {
            products::store_output(p, row, output_of(of), sum + residual[i]);
          } else if (tile_output < kHalf) {
            const float value = p.alpha * sum_over_warps(tile_output + kHalf);
            products::store_output(p, row, output_of(of), products::swiglu(p, sum, value));
          }
        }
        tile += at_once * gridDim.x;
        if (tile < tiles) __syncthreads();  // all have read the sums
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const int32_t last = program.links * static_cast<int32_t>(gridDim.x) - 1;
      // After the last link nobody waits.
      if (add_to_count(program.count) == last) *program.count = 0;
    }
#pragma unroll 1
    for (; deferred > 0; --deferred) weights.copy_next();
  }
  cp_async_wait<0>();
}

bool fits(const FewRows& p) {
  const int64_t most = int64_t{kMostChunks} * kWarps * kChunk;
  const int64_t most_normed = int64_t{kMostNormed} * kWarps * kChunk;
  const int64_t outputs = p.swiglu ? kHalf : kTileOutputs;
  const auto is_short = [](int64_t stride) { return stride <= INT32_MAX; };
  return p.rows > 0 && p.rows <= kChainRows && p.n > 0 && p.n % outputs == 0 &&
         p.n < INT32_MAX / 2 && p.k % kChunk == 0 &&
         p.k <= (p.norm_w == nullptr ? most : most_normed) && vectors_fit<8>(p.x, p.w, p.norm_w) &&
         is_short(p.x.stride) && is_short(p.w.stride) && is_short(p.y.stride) &&
         is_short(p.residual.stride);
}
bool fits(const Decode& t) {
  return t.batch > 0 && t.batch <= kChainRows && t.heads > 0 && t.head_dim > 32 &&
         t.head_dim <= 128 && cached::has_vectors(t);
}

bool fits(const Rope& p) {
  return p.rows > 0 && p.rows <= kChainRows && p.heads > 0 && p.head_dim > 0 &&
         p.head_dim % 2 == 0 && p.head_dim / 2 <= kMostFrequencies && p.x.stride <= INT32_MAX;
}

template <typename Link>
struct AttentionOf;
template <>
struct AttentionOf<StickBreakingDecode> {
  using Type = cached::StickBreaking;
  static Type make(const StickBreakingDecode& p) { return {p}; }
};
template <>
struct AttentionOf<SoftmaxDecode> {
  using Type = cached::Softmax<cached::NoBias>;
  static Type make(const SoftmaxDecode& p) { return {p, {}}; }
};

// Launches links that a program has room for, with attention of one kind and width.
template <int kLanes, typename Attends>
void launch(cudaStream_t stream, std::span<const ChainLink> links, int32_t* count) {
  using Attention = typename AttentionOf<Attends>::Type;
  static_assert(sizeof(Program<Attention>) <= 32764, "more than the parameters of a kernel can be");
  const unsigned blocks = blocks_of_device("chain");
  const auto program = std::make_unique<Program<Attention>>();
  program->count = count;
  program->links = static_cast<int32_t>(links.size());
  int attentions = 0;
  int rotations = 0;
  unsigned first = 0;
  for (size_t i = 0; i < links.size(); ++i) {
    if (const auto* attends = std::get_if<Attends>(&links[i])) {
      program->parts[attentions] = static_cast<int32_t>(cached::blocks_of_head(attends->t));
      program->attention[attentions++] = AttentionOf<Attends>::make(*attends);
      program->rows = static_cast<int32_t>(attends->t.batch);
      program->lengths = attends->t.lengths;
      program->kind[i] = LinkKind::kAttention;
      continue;
    }
    if (const auto* p = std::get_if<Rope>(&links[i])) {
      program->rotation[rotations++] = {.x = p->x.data,
                                        .positions = p->positions,
                                        .stride = static_cast<int32_t>(p->x.stride),
                                        .heads = p->heads,
                                        .half = p->head_dim / 2};
      std::copy_n(p->turns, p->head_dim / 2, program->turns);
      program->rows = static_cast<int32_t>(p->rows);
      program->kind[i] = LinkKind::kRotation;
      continue;
    }
    const auto& p = std::get<FewRows>(links[i]);
    program->rows = static_cast<int32_t>(p.rows);
    program->product[program->products++] = {
        .y = p.y.data,
        .x = p.x.data,
        .w = p.w.data,
        .residual = p.residual.data,
        .norm_w = p.norm_w,
        .y_stride = static_cast<int32_t>(p.y.stride),
        .x_stride = static_cast<int32_t>(p.x.stride),
        .w_stride = static_cast<int32_t>(p.w.stride),
        .residual_stride = static_cast<int32_t>(p.residual.stride),
        .n = static_cast<int32_t>(p.n),
        .k = static_cast<int32_t>(p.k),
        .alpha = p.alpha,
        .norm_eps = p.norm_eps,
        .first = first,
        .type = p.type,
        .swiglu = p.swiglu};
    first = static_cast<unsigned>((first + p.n / (p.swiglu ? kHalf : kTileOutputs)) % blocks);
  }
  launch_together("chain", stream, chain_kernel<kLanes, Attention>, blocks, kThreads, kSharedBytes,
                  *program);
}

// Which of the kernels computes a link; 0: any of them.
int kind(const ChainLink& link) {
  const auto of = [](const Decode& t, int first) { return t.head_dim <= 64 ? first : first + 1; };
  if (const auto* p = std::get_if<StickBreakingDecode>(&link)) return of(p->t, 1);
  if (const auto* p = std::get_if<SoftmaxDecode>(&link)) return of(p->t, 3);
  return 0;
}

const int32_t* lengths_of(const ChainLink& link) {
  const auto* p = std::get_if<StickBreakingDecode>(&link);
  return p != nullptr ? p->t.lengths : std::get<SoftmaxDecode>(link).t.lengths;
}
bool same_frequencies(const Rope& a, const Rope& b) {
  return a.head_dim == b.head_dim && std::equal(a.turns, a.turns + a.head_dim / 2, b.turns);
}

void launch(cudaStream_t stream, std::span<const ChainLink> links, int32_t* count, int kind) {
  switch (kind) {
    case 2:
      return launch<16, StickBreakingDecode>(stream, links, count);
    case 3:
      return launch<8, SoftmaxDecode>(stream, links, count);
    case 4:
      return launch<16, SoftmaxDecode>(stream, links, count);
    default:
      return launch<8, StickBreakingDecode>(stream, links, count);
  }
}

}  // namespace

bool chain_runs() {
  constexpr size_t kStaticBytes = 8 << 10;  // at most
  return shared_bytes_of_block("chain") >= kSharedBytes + kStaticBytes;
}

bool chain_takes(const ChainLink& link) {
  if (const auto* p = std::get_if<FewRows>(&link)) return fits(*p);
  if (const auto* p = std::get_if<StickBreakingDecode>(&link)) return fits(p->t);
  if (const auto* p = std::get_if<Rope>(&link)) return fits(*p);
  return fits(std::get<SoftmaxDecode>(link).t);
}

void chain(cudaStream_t stream, std::span<const ChainLink> links, int32_t* count) {
  for (size_t begin = 0; begin < links.size();) {
    int products = 0;
    int attentions = 0;
    int rotations = 0;
    int of = 0;
    const Rope* rope = nullptr;
    const int32_t* lengths = nullptr;
    // Whether the program that has the links from `begin` on can have this one as well.
    const auto add = [&](const ChainLink& link) {
      if (std::holds_alternative<FewRows>(link)) return ++products <= kMostProducts;
      if (const auto* p = std::get_if<Rope>(&link)) {
        if (rope == nullptr) rope = p;
        return ++rotations <= kMostRotations && same_frequencies(*rope, *p);
      }
      if (of == 0) of = kind(link);
      if (lengths == nullptr) lengths = lengths_of(link);
      return ++attentions <= kMostAttentions && kind(link) == of && lengths_of(link) == lengths;
    };
    size_t end = begin;
    while (end < links.size() && add(links[end])) ++end;
    launch(stream, links.subspan(begin, end - begin), count, of);
    begin = end;
  }
}

}  // namespace sbtrain::kernels
