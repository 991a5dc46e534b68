#include "kernels/elementwise.cuh"
#include "kernels/short_conv.h"
#include "kernels/token_sums.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kConvWidth = 8;

// The row that is `back` tokens before `row`; zeros if that is before the document.
template <int kWidth>
__device__ Pack<bf16, kWidth> load_tap(Matrix<const bf16> u, int64_t row, int64_t col,
                                       int32_t position, int back) {
  Pack<bf16, kWidth> x{};
  if (position >= back) x = load_pack<kWidth>(u.row(row - back) + col);
  return x;
}

// Weights of kWidth channels.
template <int kWidth>
struct Kernel {
  __device__ Kernel(const ShortConvWeights& w, int64_t col)
      : bias(load_floats<kWidth>(w.b + col)), gate_bias(load_floats<kWidth>(w.gate_bias + col)) {
    Pack<bf16, kWidth> packs[kConvTaps];  // [kWidth, 3]
#pragma unroll
    for (int k = 0; k < kConvTaps; ++k) {
      packs[k] = load_pack<kWidth>(w.w + col * kConvTaps + k * kWidth);
    }
#pragma unroll
    for (int i = 0; i < kConvTaps * kWidth; ++i) {
      tap[i % kConvTaps][i / kConvTaps] = to_float(packs[i / kWidth][i % kWidth]);
    }
  }
  // u[back]: of the token itself, the one before and the one before that.
  __device__ Pack<float, kWidth> convolve(const Pack<bf16, kWidth> (&u)[kConvTaps]) const {
    Pack<float, kWidth> c = bias;
#pragma unroll
    for (int back = 0; back < kConvTaps; ++back) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) c[i] += tap[kConvTaps - 1 - back][i] * to_float(u[back][i]);
    }
    return c;
  }
  Pack<float, kWidth> tap[kConvTaps];
  Pack<float, kWidth> bias, gate_bias;
};

template <int kWidth>
struct Loaded {
  Pack<bf16, kWidth> u[kConvTaps], gate;
};

// y = c (gate + gate_bias) + u.
template <int kWidth>
__device__ Pack<float, kWidth> gated(const ShortConvWeights& w, int64_t col,
                                     const Loaded<kWidth>& x) {
  const Kernel<kWidth> kernel(w, col);
  auto y = kernel.convolve(x.u);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    y[i] = y[i] * (to_float(x.gate[i]) + kernel.gate_bias[i]) + to_float(x.u[0][i]);
  }
  return y;
}

struct ForwardOp {
  ShortConv p;
  template <int kWidth>
  __device__ Loaded<kWidth> load(int64_t row, int64_t col) const {
    Loaded<kWidth> x;
    const int32_t position = p.positions[row];
#pragma unroll
    for (int back = 0; back < kConvTaps; ++back) {
      x.u[back] = load_tap<kWidth>(p.u, row, col, position, back);
    }
    x.gate = load_pack<kWidth>(p.gate.row(row) + col);
    return x;
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Loaded<kWidth>& x) const {
    store_floats(p.y.row(row) + col, gated(p.w, col, x));
  }
};

struct DecodeOp {
  ShortConvDecode p;
  template <int kWidth>
  __device__ Loaded<kWidth> load(int64_t row, int64_t col) const {
    const bf16* earlier = p.state.row(row) + col;
    const int32_t position = p.positions[row];
    Loaded<kWidth> x{};
    x.u[0] = load_pack<kWidth>(p.u.row(row) + col);
    if (position >= 1) x.u[1] = load_pack<kWidth>(earlier + p.cols);
    if (position >= 2) x.u[2] = load_pack<kWidth>(earlier);
    x.gate = load_pack<kWidth>(p.gate.row(row) + col);
    return x;
  }
  // Inputs from before the document are stored as 0, so that they count as 0 for later tokens too.
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Loaded<kWidth>& x) const {
    bf16* earlier = p.state.row(row) + col;
    store_floats(p.y.row(row) + col, gated(p.w, col, x));
    store_pack(earlier, x.u[1]);
    store_pack(earlier + p.cols, x.u[0]);
  }
};

constexpr int kConvThreads = 256;

// dgate = dy c,  dc = dy (gate + gate_bias),  du_t = dy_t + sum_m w_{2-m} dc_{t+m} over the tokens
// t + m of the same document. Adds this row's dc u to sums[0..2], dc to sums[3], dgate to sums[4].
template <int kWidth>
__device__ void backward_row(const ShortConvBackward& p, const Kernel<kWidth>& kernel, int64_t row,
                             int64_t col, float (&sums)[kShortConvSums][kWidth]) {
  const int32_t position = p.positions[row];
  Pack<bf16, kWidth> u[kConvTaps];
#pragma unroll
  for (int back = 0; back < kConvTaps; ++back) {
    u[back] = load_tap<kWidth>(p.u, row, col, position, back);
  }
  auto dgate = kernel.convolve(u);
  Pack<float, kWidth> du;
#pragma unroll
  for (int ahead = 0; ahead < kConvTaps; ++ahead) {
    const int64_t later = row + ahead;
    if (later >= p.rows || p.positions[later] < ahead) break;
    const auto dy = load_floats<kWidth>(p.dy.row(later) + col);
    const auto gate = load_floats<kWidth>(p.gate.row(later) + col);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float dc = dy[i] * (gate[i] + kernel.gate_bias[i]);
      const float to_u = kernel.tap[kConvTaps - 1 - ahead][i] * dc;
      du[i] = ahead == 0 ? dy[i] + to_u : du[i] + to_u;
      if (ahead > 0) continue;
      dgate[i] *= dy[i];
#pragma unroll
      for (int k = 0; k < kConvTaps; ++k) sums[k][i] += dc * to_float(u[kConvTaps - 1 - k][i]);
      sums[kConvTaps][i] += dc;
      sums[kConvTaps + 1][i] += dgate[i];
    }
  }
  store_floats(p.du.row(row) + col, du);
  store_floats(p.dgate.row(row) + col, dgate);
}

// One part of the rows and up to kConvThreads packs of columns. `lanes` threads share a row; each
// of the kConvThreads / lanes slots walks its own rows, and slots are added in order.
template <int kWidth>
__global__ void __launch_bounds__(kConvThreads)
    short_conv_backward_kernel(const ShortConvBackward p, int lanes) {
  __shared__ float shared[kConvThreads * kWidth];
  const int lane = threadIdx.x % lanes;
  const int slot = threadIdx.x / lanes;
  const int slots = kConvThreads / lanes;
  const int64_t col = (int64_t{blockIdx.y} * lanes + lane) * kWidth;
  const bool active = col < p.cols;
  float sums[kShortConvSums][kWidth] = {};
  if (active) {
    const Kernel<kWidth> kernel(p.w, col);
    const int64_t end = first_row(p.rows, blockIdx.x + 1);
    for (int64_t row = first_row(p.rows, blockIdx.x) + slot; row < end; row += slots) {
      backward_row<kWidth>(p, kernel, row, col, sums);
    }
  }
  float* out = p.scratch + blockIdx.x * kShortConvSums * p.cols;
#pragma unroll
  for (int which = 0; which < kShortConvSums; ++which) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWidth; ++i) shared[threadIdx.x * kWidth + i] = sums[which][i];
    __syncthreads();
    if (slot > 0 || !active) continue;
    for (int i = 0; i < kWidth; ++i) {
      float total = 0.0f;
      for (int s = 0; s < slots; ++s) total += shared[(s * lanes + lane) * kWidth + i];
      const int64_t at =
          which < kConvTaps ? (col + i) * kConvTaps + which : which * p.cols + col + i;
      out[at] = total;
    }
  }
}

template <int kWidth>
bool weights_fit(const ShortConvWeights& w) {
  return vectors_fit<kWidth>(w.w, w.b, w.gate_bias);
}

}  // namespace

void launch(cudaStream_t stream, const ShortConv& p) {
  const bool vectors = vectors_fit<kConvWidth>(p.y, p.u, p.gate) && weights_fit<kConvWidth>(p.w);
  launch_elementwise<kConvWidth>(stream, "short_conv_forward", p.rows, p.cols, vectors,
                                 ForwardOp{p});
}

void launch(cudaStream_t stream, const ShortConvBackward& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const bool vectors = p.cols % kConvWidth == 0 &&
                       vectors_fit<kConvWidth>(p.du, p.dgate, p.dy, p.u, p.gate) &&
                       weights_fit<kConvWidth>(p.w);
  with_width<kConvWidth>(vectors, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    const int64_t packs = p.cols / kPackWidth;
    int lanes = 1;
    while (lanes < packs && lanes < kConvThreads) lanes *= 2;
    const dim3 grid(kTokenParts, blocks(packs, lanes));
    short_conv_backward_kernel<kPackWidth><<<grid, kConvThreads, 0, stream>>>(p, lanes);
  });
  check_launch("short_conv_backward");
  const int64_t stride = kShortConvSums * p.cols;
  add_parts(stream, p.dw.w, p.scratch, stride, kConvTaps * p.cols);
  add_parts(stream, p.dw.b, p.scratch + kConvTaps * p.cols, stride, p.cols);
  add_parts(stream, p.dw.gate_bias, p.scratch + (kConvTaps + 1) * p.cols, stride, p.cols);
}

void launch(cudaStream_t stream, const ShortConvDecode& p) {
  const bool vectors = p.cols % kConvWidth == 0 &&
                       vectors_fit<kConvWidth>(p.y, p.u, p.gate, p.state) &&
                       weights_fit<kConvWidth>(p.w);
  launch_elementwise<kConvWidth>(stream, "short_conv_decode", p.rows, p.cols, vectors, DecodeOp{p});
}

}  // namespace sbtrain::kernels
