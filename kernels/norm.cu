#include "kernels/amax.cuh"
#include "kernels/norm.h"
#include "kernels/pack.cuh"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/reduce.cuh"
#include "kernels/token_sums.cuh"

namespace sbtrain::kernels {
namespace {

// How a row (of one token, or of one head of it) lies in registers: kLanes threads hold kHeld packs
// of kWidth elements each; neighbouring threads hold neighbouring packs.
template <int kWidth_, int kLanes_, int kHeld_>
struct Shape {
  static constexpr int kWidth = kWidth_;
  static constexpr int kLanes = kLanes_;
  static constexpr int kHeld = kHeld_;
  static constexpr int kThreads = kLanes > 256 ? kLanes : 256;
  static constexpr int kGroups = kThreads / kLanes;  // rows at a time in one block
  // Calls f(k, column) for the calling thread's packs within the row.
  template <typename F>
  static __device__ void for_each_pack(int cols, int lane, F&& f) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int col = (k * kLanes + lane) * kWidth;
      if (col < cols) f(k, col);
    }
  }
};

template <typename S>
struct Row {
  Pack<bf16, S::kWidth> pack[S::kHeld];
  __device__ Row(const bf16* data, int cols, int lane) {
    S::for_each_pack(cols, lane,
                     [&](int k, int col) { pack[k] = load_pack<S::kWidth>(data + col); });
  }
  __device__ Pack<float, S::kWidth> floats(int k) const { return convert<float>(pack[k]); }
};

// ---- RMSNorm ----------------------------------------------------------------------------------

template <typename S, bool kAmax>
__global__ void __launch_bounds__(S::kThreads) rmsnorm_kernel(const RmsNorm p) {
  let_next_kernel_begin();
  if (S::kWidth == 8 && p.early && threadIdx.x == 0) {
    prefetch_to_l2(p.w, static_cast<uint32_t>(p.cols * sizeof(bf16)));
  }
  wait_for_previous_kernel();
  const int lane = threadIdx.x % S::kLanes;
  const int cols = static_cast<int>(p.cols);
  const int64_t row = int64_t{blockIdx.x} * S::kGroups + threadIdx.x / S::kLanes;
  if (row >= p.rows) return;  // a whole warp or block
  const Row<S> x(p.x.row(row), cols, lane);
  float squares[1] = {};
  S::for_each_pack(cols, lane, [&](int k, int /*col*/) {
    const auto v = x.floats(k);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) squares[0] += v[i] * v[i];
  });
  group_sum<S::kLanes>(squares);
  const float r = rsqrtf(squares[0] / static_cast<float>(cols) + p.eps);
  unsigned largest = 0;
  S::for_each_pack(cols, lane, [&](int k, int col) {
    auto v = x.floats(k);
    const auto w = load_floats<S::kWidth>(p.w + col);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) v[i] *= r * w[i];
    const auto y = convert<bf16>(v);
    store_pack(p.y.row(row) + col, y);
    if constexpr (kAmax) largest = max(largest, largest_bits(y));
  });
  if constexpr (kAmax) raise_amax(p.amax, largest);
}

// With r = 1/rms(x), xhat = r x and g = w dy:  dx += r (g - xhat mean(g xhat)). Adds this row's
// dy xhat to dw. Returns largest_bits() of this thread's dx, or 0 without kAmax.
template <typename S, bool kAmax>
__device__ unsigned rmsnorm_backward_row(const RmsNormBackward& p, int64_t row, int lane,
                                         float (&dw)[S::kHeld][S::kWidth]) {
  const int cols = static_cast<int>(p.cols);
  const Row<S> x(p.x.row(row), cols, lane);
  const Row<S> dy(p.dy.row(row), cols, lane);
  const Row<S> before(p.dx.row(row), cols, lane);  // arrives while the row is summed
  float sums[2] = {};
  S::for_each_pack(cols, lane, [&](int k, int col) {
    const auto v = x.floats(k);
    const auto g = dy.floats(k);
    const auto w = load_floats<S::kWidth>(p.w + col);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) {
      sums[0] += v[i] * v[i];
      sums[1] += g[i] * w[i] * v[i];
    }
  });
  group_sum<S::kLanes>(sums);
  const float r = rsqrtf(sums[0] / static_cast<float>(cols) + p.eps);
  const float mean = sums[1] * r / static_cast<float>(cols);
  unsigned largest = 0;
  S::for_each_pack(cols, lane, [&](int k, int col) {
    const auto v = x.floats(k);
    const auto g = dy.floats(k);
    const auto w = load_floats<S::kWidth>(p.w + col);
    auto dx = before.floats(k);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) {
      const float normed = v[i] * r;
      dw[k][i] += g[i] * normed;
      dx[i] += r * (g[i] * w[i] - normed * mean);
    }
    const auto rounded = convert<bf16>(dx);
    store_pack(p.dx.row(row) + col, rounded);
    if constexpr (kAmax) largest = max(largest, largest_bits(rounded));
  });
  return largest;
}

// Few enough that two blocks of a multiprocessor hold x, dy, dx and the sums of dw in registers.
template <typename S>
inline constexpr int kBackwardThreads = S::kLanes == 32 ? 128 : S::kThreads;

// out [cols] = the sum of all groups' values. Every thread of the block must take part.
template <typename S, int kGroups>
__device__ void store_block_sums(float* out, const float (&sums)[S::kHeld][S::kWidth], int cols) {
  const int lane = threadIdx.x % S::kLanes;
  const int group = threadIdx.x / S::kLanes;
  if constexpr (kGroups > 1) {
    __shared__ float total[S::kWidth * S::kLanes * S::kHeld];
    for (int g = 0; g < kGroups; ++g) {  // groups one after the other: a fixed order
      __syncthreads();
      if (group != g) continue;
      S::for_each_pack(cols, lane, [&](int k, int col) {
#pragma unroll
        for (int i = 0; i < S::kWidth; ++i) {
          total[col + i] = g == 0 ? sums[k][i] : total[col + i] + sums[k][i];
        }
      });
    }
    __syncthreads();
    for (int col = threadIdx.x; col < cols; col += kGroups * S::kLanes) out[col] = total[col];
  } else {
    S::for_each_pack(cols, lane, [&](int k, int col) {
#pragma unroll
      for (int i = 0; i < S::kWidth; ++i) out[col + i] = sums[k][i];
    });
  }
}

// Block `part` sums dw over its rows.
template <typename S, bool kAmax>
__global__ void __launch_bounds__(kBackwardThreads<S>, S::kLanes == 32 ? 2 : 1)
    rmsnorm_backward_kernel(const RmsNormBackward p) {
  constexpr int kGroups = kBackwardThreads<S> / S::kLanes;
  let_next_kernel_begin();
  const int lane = threadIdx.x % S::kLanes;
  const int group = threadIdx.x / S::kLanes;
  const int cols = static_cast<int>(p.cols);
  float dw[S::kHeld][S::kWidth] = {};
  unsigned largest = 0;
  const int64_t end = first_row(p.rows, blockIdx.x + 1);
  for (int64_t row = first_row(p.rows, blockIdx.x) + group; row < end; row += kGroups) {
    largest = max(largest, rmsnorm_backward_row<S, kAmax>(p, row, lane, dw));
  }
  if constexpr (kAmax) raise_amax(p.amax, largest);
  store_block_sums<S, kGroups>(p.scratch + blockIdx.x * p.cols, dw, cols);
}

// Calls launch(shape) with the smallest shape that holds a row.
template <typename Launch>
void with_row_shape(const char* name, int64_t cols, bool vectors, Launch&& launch) {
  if (cols > kMaxNormWidth) {
    throw_invalid_argument("%s: rows of %lld elements are too wide", name,
                           static_cast<long long>(cols));
  }
  if (!vectors) return cols <= 512 ? launch(Shape<1, 32, 16>{}) : launch(Shape<1, 512, 32>{});
  if (cols <= 512) return launch(Shape<8, 32, 2>{});
  if (cols <= 1024) return launch(Shape<8, 32, 4>{});
  if (cols <= 1536) return launch(Shape<8, 32, 6>{});
  if (cols <= 4096) return launch(Shape<8, 256, 2>{});
  launch(Shape<8, 256, 8>{});
}

// ---- LayerNorm ----------------------------------------------------------------------------------

// Mean and 1 / sqrt(variance + eps) of the channels of one row, or of one head of it.
struct Moments {
  float mean, inverse_std;
};
template <typename S>
__device__ Moments moments(const Row<S>& x, int cols, int lane, float eps) {
  const auto inverse = 1.0f / static_cast<float>(cols);
  float sum[1] = {};
  S::for_each_pack(cols, lane, [&](int k, int /*col*/) {
    const auto v = x.floats(k);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) sum[0] += v[i];
  });
  group_sum<S::kLanes>(sum);
  const float mean = sum[0] * inverse;
  float squares[1] = {};
  S::for_each_pack(cols, lane, [&](int k, int /*col*/) {
    const auto v = x.floats(k);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) squares[0] += (v[i] - mean) * (v[i] - mean);
  });
  group_sum<S::kLanes>(squares);
  return {mean, rsqrtf(squares[0] * inverse + eps)};
}

// y = xhat w + b, xhat = (x - mean) / std.
template <typename S>
__device__ void layernorm_row(bf16* y, const Row<S>& x, const bf16* w_row, const bf16* b_row,
                              int cols, int lane, const Moments& m) {
  S::for_each_pack(cols, lane, [&](int k, int col) {
    auto v = x.floats(k);
    const auto w = load_floats<S::kWidth>(w_row + col);
    const auto b = load_floats<S::kWidth>(b_row + col);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) v[i] = (v[i] - m.mean) * m.inverse_std * w[i] + b[i];
    store_floats(y + col, v);
  });
}

template <typename S>
__global__ void __launch_bounds__(S::kThreads) layernorm_kernel(const LayerNorm p) {
  const int lane = threadIdx.x % S::kLanes;
  const int cols = static_cast<int>(p.cols);
  const int64_t row = int64_t{blockIdx.x} * S::kGroups + threadIdx.x / S::kLanes;
  if (row >= p.rows) return;  // a whole warp or block
  const Row<S> x(p.x.row(row), cols, lane);
  layernorm_row<S>(p.y.row(row), x, p.w, p.b, cols, lane, moments(x, cols, lane, p.eps));
}

// Sums over rows of dy xhat and dy.
template <typename S>
struct WeightSums {
  float dw[S::kHeld][S::kWidth] = {};
  float db[S::kHeld][S::kWidth] = {};
};

// With xhat = (x - mean) r and g = w dy:  dx = r (g - mean(g) - xhat mean(g xhat)), with
// `accumulate` added to what is there. Adds to the sums. Lanes of rows that are not `active` take
// part only in the means.
template <typename S>
__device__ void layernorm_backward_row(bf16* dx_row, bool accumulate, const Row<S>& x,
                                       const Row<S>& dy, const bf16* w_row, int cols, int lane,
                                       float eps, bool active, WeightSums<S>& sums) {
  const Moments m = moments(x, cols, lane, eps);
  float projections[2] = {};  // of g on 1 and on xhat
  S::for_each_pack(cols, lane, [&](int k, int col) {
    const auto v = x.floats(k);
    const auto g = dy.floats(k);
    const auto w = load_floats<S::kWidth>(w_row + col);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) {
      projections[0] += g[i] * w[i];
      projections[1] += g[i] * w[i] * ((v[i] - m.mean) * m.inverse_std);
    }
  });
  group_sum<S::kLanes>(projections);
  if (!active) return;
  const float g_mean = projections[0] / static_cast<float>(cols);
  const float xhat_mean = projections[1] / static_cast<float>(cols);
  S::for_each_pack(cols, lane, [&](int k, int col) {
    const auto v = x.floats(k);
    const auto g = dy.floats(k);
    const auto w = load_floats<S::kWidth>(w_row + col);
    Pack<float, S::kWidth> dx{};
    if (accumulate) dx = load_floats<S::kWidth>(dx_row + col);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) {
      const float normed = (v[i] - m.mean) * m.inverse_std;
      sums.dw[k][i] += g[i] * normed;
      sums.db[k][i] += g[i];
      dx[i] += m.inverse_std * (g[i] * w[i] - g_mean - normed * xhat_mean);
    }
    store_floats(dx_row + col, dx);
  });
}

// Block `part` sums dw and db over its rows.
template <typename S>
__global__ void __launch_bounds__(kBackwardThreads<S>)
    layernorm_backward_kernel(const LayerNormBackward p) {
  constexpr int kGroups = kBackwardThreads<S> / S::kLanes;
  const int lane = threadIdx.x % S::kLanes;
  const int cols = static_cast<int>(p.cols);
  WeightSums<S> sums;
  const int64_t end = first_row(p.rows, blockIdx.x + 1);
  const int64_t begin = first_row(p.rows, blockIdx.x) + threadIdx.x / S::kLanes;
  for (int64_t row = begin; row < end; row += kGroups) {
    const Row<S> x(p.x.row(row), cols, lane);
    const Row<S> dy(p.dy.row(row), cols, lane);
    layernorm_backward_row<S>(p.dx.row(row), p.accumulate, x, dy, p.w, cols, lane, p.eps,
                              /*active=*/true, sums);
  }
  float* out = p.scratch + blockIdx.x * 2 * p.cols;
  store_block_sums<S, kGroups>(out, sums.dw, cols);
  __syncthreads();  // the sums share their memory
  store_block_sums<S, kGroups>(out + p.cols, sums.db, cols);
}

// ---- Head norm --------------------------------------------------------------------------------

template <typename S>
__global__ void __launch_bounds__(S::kThreads) head_norm_kernel(const HeadNorm p) {
  const int lane = threadIdx.x % S::kLanes;
  const int64_t task = int64_t{blockIdx.x} * S::kGroups + threadIdx.x / S::kLanes;
  const bool active = task < p.rows * p.heads;  // idle groups still take part in the sums
  const int64_t row = active ? task / p.heads : 0;
  const int first = active ? static_cast<int>(task - row * p.heads) * p.head_dim : 0;
  const Row<S> x(p.x.row(row) + first, p.head_dim, lane);
  const Moments m = moments(x, p.head_dim, lane, p.eps);
  if (!active) return;
  layernorm_row<S>(p.y.row(row) + first, x, p.w + first, p.b + first, p.head_dim, lane, m);
}

// Block (part, slice) sums over the part's rows for `heads_per_block` heads. A group of lanes keeps
// to one head; `slots` groups share a head and take turns with its rows.
template <typename S>
__global__ void __launch_bounds__(S::kThreads)
    head_norm_backward_kernel(const HeadNormBackward p, int heads_per_block, int slots) {
  const int lane = threadIdx.x % S::kLanes;
  const int group = threadIdx.x / S::kLanes;
  const int slot = group / heads_per_block;
  const int head = blockIdx.y * heads_per_block + group % heads_per_block;
  const bool in_use = slot < slots && head < p.heads;
  const int first = in_use ? head * p.head_dim : 0;
  const int64_t end = first_row(p.rows, blockIdx.x + 1);
  const auto load = [&](Matrix<const bf16> matrix, int64_t row) {
    return Row<S>(matrix.row(min(row, p.rows - 1)) + first, p.head_dim, lane);
  };
  int64_t row = first_row(p.rows, blockIdx.x) + slot;
  Row<S> x = load(p.x, row);
  Row<S> dy = load(p.dy, row);
  WeightSums<S> sums;
  // All lanes of a warp take the same number of turns. The next rows arrive meanwhile.
  for (; row - slot < end; row += slots) {
    const Row<S> next_x = load(p.x, row + slots);
    const Row<S> next_dy = load(p.dy, row + slots);
    layernorm_backward_row<S>(p.dx.row(row) + first, /*accumulate=*/false, x, dy, p.w + first,
                              p.head_dim, lane, p.eps, in_use && row < end, sums);
    x = next_x;
    dy = next_dy;
  }
  const int64_t cols = int64_t{p.heads} * p.head_dim;
  float* dw = p.scratch + blockIdx.x * 2 * cols + first;
  for (int s = 0; s < slots; ++s) {  // slots one after the other: a fixed order
    __syncthreads();
    if (slot != s || !in_use) continue;
    S::for_each_pack(p.head_dim, lane, [&](int k, int col) {
#pragma unroll
      for (int i = 0; i < S::kWidth; ++i) {
        dw[col + i] = (s == 0 ? 0.0f : dw[col + i]) + sums.dw[k][i];
        dw[cols + col + i] = (s == 0 ? 0.0f : dw[cols + col + i]) + sums.db[k][i];
      }
    });
  }
}

// ---- RMSNorm of heads -------------------------------------------------------------------------

// Where task (row, head) of a matrix begins; tasks count the heads of a row, then the next row.
struct HeadOfRow {
  __device__ HeadOfRow(int64_t task, int heads, int head_dim)
      : row(task / heads), first(static_cast<int>(task - row * heads) * head_dim) {}
  int64_t row;
  int first;  // column
};

template <typename S>
__global__ void __launch_bounds__(S::kThreads) head_rmsnorm_kernel(const HeadRmsNorm p) {
  const int lane = threadIdx.x % S::kLanes;
  const int64_t task = int64_t{blockIdx.x} * S::kGroups + threadIdx.x / S::kLanes;
  const bool active = task < p.rows * p.heads;  // idle groups still take part in the sums
  const HeadOfRow head(active ? task : 0, p.heads, p.head_dim);
  const Row<S> x(p.x.row(head.row) + head.first, p.head_dim, lane);
  float squares[1] = {};
  S::for_each_pack(p.head_dim, lane, [&](int k, int /*col*/) {
    const auto v = x.floats(k);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) squares[0] += v[i] * v[i];
  });
  group_sum<S::kLanes>(squares);
  if (!active) return;
  const float r = rsqrtf(squares[0] / static_cast<float>(p.head_dim) + p.eps);
  S::for_each_pack(p.head_dim, lane, [&](int k, int col) {
    auto v = x.floats(k);
    const auto w = load_floats<S::kWidth>(p.w + col);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) v[i] *= r * w[i];
    store_floats(p.y.row(head.row) + head.first + col, v);
  });
}

// dx = r (g - xhat mean(g xhat)), as in rmsnorm_backward_row; adds dy xhat to dw. Lanes that are
// not `active` take part only in the sums.
template <typename S>
__device__ void head_rmsnorm_backward_row(const HeadRmsNormBackward& p, const HeadOfRow& head,
                                          int lane, bool active, float (&dw)[S::kHeld][S::kWidth]) {
  const Row<S> x(p.x.row(head.row) + head.first, p.head_dim, lane);
  const Row<S> dy(p.dy.row(head.row) + head.first, p.head_dim, lane);
  float sums[2] = {};
  S::for_each_pack(p.head_dim, lane, [&](int k, int col) {
    const auto v = x.floats(k);
    const auto g = dy.floats(k);
    const auto w = load_floats<S::kWidth>(p.w + col);
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) {
      sums[0] += v[i] * v[i];
      sums[1] += g[i] * w[i] * v[i];
    }
  });
  group_sum<S::kLanes>(sums);
  if (!active) return;
  const float r = rsqrtf(sums[0] / static_cast<float>(p.head_dim) + p.eps);
  const float mean = sums[1] * r / static_cast<float>(p.head_dim);
  S::for_each_pack(p.head_dim, lane, [&](int k, int col) {
    const auto v = x.floats(k);
    const auto g = dy.floats(k);
    const auto w = load_floats<S::kWidth>(p.w + col);
    Pack<float, S::kWidth> dx;
#pragma unroll
    for (int i = 0; i < S::kWidth; ++i) {
      const float normed = v[i] * r;
      dw[k][i] += g[i] * normed;
      dx[i] = r * (g[i] * w[i] - normed * mean);
    }
    store_floats(p.dx.row(head.row) + head.first + col, dx);
  });
}

// Block `part` sums dw over all heads of its rows. A group of lanes takes every kGroups-th head.
template <typename S>
__global__ void __launch_bounds__(S::kThreads)
    head_rmsnorm_backward_kernel(const HeadRmsNormBackward p) {
  const int lane = threadIdx.x % S::kLanes;
  const int group = threadIdx.x / S::kLanes;
  const int64_t begin = first_row(p.rows, blockIdx.x) * p.heads;
  const int64_t end = first_row(p.rows, blockIdx.x + 1) * p.heads;
  float dw[S::kHeld][S::kWidth] = {};
  // All groups of a block take the same number of turns, since groups share a warp.
  for (int64_t first = begin; first < end; first += S::kGroups) {
    const bool active = first + group < end;
    const HeadOfRow head(active ? first + group : end - 1, p.heads, p.head_dim);
    head_rmsnorm_backward_row<S>(p, head, lane, active, dw);
  }
  store_block_sums<S, S::kGroups>(p.scratch + int64_t{blockIdx.x} * p.head_dim, dw, p.head_dim);
}

template <typename Launch>
void with_head_shape(const char* name, int64_t head_dim, bool vectors, Launch&& launch) {
  if (head_dim > (vectors ? kMaxHeadDim : kMaxScalarHeadDim)) {
    throw_invalid_argument("%s: heads of %lld channels are too large", name,
                           static_cast<long long>(head_dim));
  }
  if (!vectors) return launch(Shape<1, 32, 8>{});
  if (head_dim <= 64) return launch(Shape<8, 4, 2>{});
  if (head_dim <= 128) return launch(Shape<8, 8, 2>{});
  launch(Shape<8, 32, 2>{});
}

// The same for RMSNorm, of which the only head of a row may be wider.
template <typename Launch>
void with_head_rmsnorm_shape(const char* name, int heads, int64_t head_dim, bool vectors,
                             Launch&& launch) {
  if (heads > 1 || head_dim <= (vectors ? kMaxHeadDim : kMaxScalarHeadDim)) {
    return with_head_shape(name, head_dim, vectors, launch);
  }
  with_row_shape(name, head_dim, vectors, launch);
}

}  // namespace

void launch(cudaStream_t stream, const RmsNorm& p) {
  if (p.amax != nullptr) clear_amax("rmsnorm", stream, p.amax);
  if (p.rows == 0 || p.cols == 0) return;
  const bool vectors = p.cols % 8 == 0 && vectors_fit<8>(p.y, p.x, p.w);
  with_row_shape("rmsnorm", p.cols, vectors, [&](auto shape) {
    using S = decltype(shape);
    // What comes before a kernel with amax is no kernel.
    const bool early = p.early && p.amax == nullptr;
    const auto kernel = p.amax != nullptr ? rmsnorm_kernel<S, true> : rmsnorm_kernel<S, false>;
    launch_early("rmsnorm", early, stream, kernel, {dim3(blocks(p.rows, S::kGroups)), S::kThreads},
                 p);
  });
}

void launch(cudaStream_t stream, const RmsNormBackward& p) {
  if (p.amax != nullptr) clear_amax("rmsnorm_backward", stream, p.amax);
  if (p.rows == 0 || p.cols == 0) return;
  const bool vectors = p.cols % 8 == 0 && vectors_fit<8>(p.dx, p.dy, p.x, p.w);
  with_row_shape("rmsnorm_backward", p.cols, vectors, [&](auto shape) {
    using S = decltype(shape);
    const auto kernel =
        p.amax != nullptr ? rmsnorm_backward_kernel<S, true> : rmsnorm_backward_kernel<S, false>;
    kernel<<<kTokenParts, kBackwardThreads<S>, 0, stream>>>(p);
  });
  check_launch("rmsnorm_backward");
  add_parts(stream, p.dw, p.scratch, p.cols, p.cols, p.accumulate_dw, p.early);
}

void launch(cudaStream_t stream, const LayerNorm& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const bool vectors = p.cols % 8 == 0 && vectors_fit<8>(p.y, p.x, p.w, p.b);
  with_row_shape("layernorm", p.cols, vectors, [&](auto shape) {
    using S = decltype(shape);
    layernorm_kernel<S><<<blocks(p.rows, S::kGroups), S::kThreads, 0, stream>>>(p);
  });
  check_launch("layernorm");
}

void launch(cudaStream_t stream, const LayerNormBackward& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const bool vectors = p.cols % 8 == 0 && vectors_fit<8>(p.dx, p.dy, p.x, p.w);
  with_row_shape("layernorm_backward", p.cols, vectors, [&](auto shape) {
    using S = decltype(shape);
    layernorm_backward_kernel<S><<<kTokenParts, kBackwardThreads<S>, 0, stream>>>(p);
  });
  check_launch("layernorm_backward");
  add_parts(stream, p.dw, p.scratch, 2 * p.cols, p.cols);
  add_parts(stream, p.db, p.scratch + p.cols, 2 * p.cols, p.cols);
}

void launch(cudaStream_t stream, const HeadNorm& p) {
  if (p.rows == 0) return;
  const bool vectors = p.head_dim % 8 == 0 && vectors_fit<8>(p.y, p.x, p.w, p.b);
  with_head_shape("head_norm", p.head_dim, vectors, [&](auto shape) {
    using S = decltype(shape);
    head_norm_kernel<S><<<blocks(p.rows * p.heads, S::kGroups), S::kThreads, 0, stream>>>(p);
  });
  check_launch("head_norm");
}

void launch(cudaStream_t stream, const HeadNormBackward& p) {
  if (p.rows == 0) return;
  const bool vectors = p.head_dim % 8 == 0 && vectors_fit<8>(p.dx, p.dy, p.x, p.w);
  with_head_shape("head_norm_backward", p.head_dim, vectors, [&](auto shape) {
    using S = decltype(shape);
    const int heads_per_block = std::min(p.heads, S::kGroups);
    const int slots = std::min(8, S::kGroups / heads_per_block);
    const dim3 grid(kTokenParts, blocks(p.heads, heads_per_block));
    head_norm_backward_kernel<S><<<grid, S::kThreads, 0, stream>>>(p, heads_per_block, slots);
  });
  check_launch("head_norm_backward");
  const int64_t cols = int64_t{p.heads} * p.head_dim;
  add_parts(stream, p.dw, p.scratch, 2 * cols, cols);
  add_parts(stream, p.db, p.scratch + cols, 2 * cols, cols);
}

void launch(cudaStream_t stream, const HeadRmsNorm& p) {
  if (p.rows == 0) return;
  const bool vectors = p.head_dim % 8 == 0 && vectors_fit<8>(p.y, p.x, p.w);
  with_head_rmsnorm_shape("head_rmsnorm", p.heads, p.head_dim, vectors, [&](auto shape) {
    using S = decltype(shape);
    head_rmsnorm_kernel<S><<<blocks(p.rows * p.heads, S::kGroups), S::kThreads, 0, stream>>>(p);
  });
  check_launch("head_rmsnorm");
}

void launch(cudaStream_t stream, const HeadRmsNormBackward& p) {
  if (p.rows == 0) return;
  const bool vectors = p.head_dim % 8 == 0 && vectors_fit<8>(p.dx, p.dy, p.x, p.w);
  with_head_rmsnorm_shape("head_rmsnorm_backward", p.heads, p.head_dim, vectors, [&](auto shape) {
    using S = decltype(shape);
    head_rmsnorm_backward_kernel<S><<<kTokenParts, S::kThreads, 0, stream>>>(p);
  });
  check_launch("head_rmsnorm_backward");
  add_parts(stream, p.dw, p.scratch, p.head_dim, p.head_dim);
}

}  // namespace sbtrain::kernels
