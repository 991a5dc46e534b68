#include "kernels/activation.h"
#include "kernels/elementwise_amax.cuh"
#include "kernels/token_sums.cuh"

namespace sbtrain::kernels {
namespace {

__device__ float sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

template <int kWidth>
struct Two {
  Pack<bf16, kWidth> a, b;
};
template <int kWidth>
struct WithFloats {
  Pack<bf16, kWidth> a;
  Pack<float, kWidth> b;
};
template <int kWidth>
struct Three {
  Pack<bf16, kWidth> a, b, c;
};

struct SwigluOp {
  Swiglu p;
  template <int kWidth>
  __device__ Two<kWidth> load(int64_t row, int64_t col) const {
    const bf16* gate = p.gate_up.row(row) + col;
    return {load_pack<kWidth>(gate), load_pack<kWidth>(gate + p.cols)};
  }
  template <int kWidth>
  __device__ unsigned store(int64_t row, int64_t col, const Two<kWidth>& loaded) const {
    const auto gate = convert<float>(loaded.a);
    auto y = convert<float>(loaded.b);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] *= gate[i] * sigmoid(gate[i]);
    const auto rounded = convert<bf16>(y);
    store_pack(p.y.row(row) + col, rounded);
    return largest_bits(rounded);
  }
};

// sigmoid(z) and sigmoid(-z), its complement, without cancellation.
struct Sigmoids {
  __device__ explicit Sigmoids(float z) {
    const float e = __expf(-fabsf(z));
    const float larger = __fdividef(1.0f, 1.0f + e);  // sigmoid(|z|)
    const float smaller = e * larger;                 // sigmoid(-|z|)
    of_z = z < 0.0f ? smaller : larger;
    of_minus_z = z < 0.0f ? larger : smaller;
  }
  float of_z, of_minus_z;
};

// silu(g)' = sigmoid(g) (1 + g (1 - sigmoid(g))). 1 - sigmoid(g) = sigmoid(-g) is formed without
// the subtraction, which would cancel for large g.
struct SwigluBackwardOp {
  SwigluBackward p;
  template <int kWidth>
  __device__ Three<kWidth> load(int64_t row, int64_t col) const {
    const bf16* gate = p.gate_up.row(row) + col;
    return {load_pack<kWidth>(gate), load_pack<kWidth>(gate + p.cols),
            load_pack<kWidth>(p.dy.row(row) + col)};
  }
  template <int kWidth>
  __device__ unsigned store(int64_t row, int64_t col, const Three<kWidth>& loaded) const {
    auto gate = convert<float>(loaded.a);
    auto up = convert<float>(loaded.b);
    const auto dy = convert<float>(loaded.c);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float g = gate[i];
      const Sigmoids s(g);
      gate[i] = dy[i] * up[i] * (s.of_z * (1.0f + g * s.of_minus_z));
      up[i] = dy[i] * (g * s.of_z);
    }
    bf16* dgate = p.dgate_up.row(row) + col;
    const auto dgate_rounded = convert<bf16>(gate), dup_rounded = convert<bf16>(up);
    store_pack(dgate, dgate_rounded);
    store_pack(dgate + p.cols, dup_rounded);
    return max(largest_bits(dgate_rounded), largest_bits(dup_rounded));
  }
};

struct BiasSigmoidOp {
  BiasSigmoid p;
  template <int kWidth>
  __device__ WithFloats<kWidth> load(int64_t row, int64_t col) const {
    return {load_pack<kWidth>(p.b + col), load_pack<kWidth>(p.x.row(row) + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const WithFloats<kWidth>& loaded) const {
    const auto b = convert<float>(loaded.a);
    Pack<float, kWidth> y = loaded.b;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] = sigmoid(y[i] + b[i]);
    store_pack(p.y.row(row) + col, y);
  }
};

struct SigmoidBackwardOp {
  SigmoidBackward p;
  template <int kWidth>
  __device__ WithFloats<kWidth> load(int64_t row, int64_t col) const {
    return {load_pack<kWidth>(p.dy.row(row) + col), load_pack<kWidth>(p.y.row(row) + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const WithFloats<kWidth>& loaded) const {
    auto dx = convert<float>(loaded.a);
    const Pack<float, kWidth>& y = loaded.b;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) dx[i] *= y[i] * (1.0f - y[i]);
    store_floats(p.dx.row(row) + col, dx);
  }
};

struct AddBiasOp {
  AddBias p;
  template <int kWidth>
  __device__ Two<kWidth> load(int64_t row, int64_t col) const {
    return {load_pack<kWidth>(p.y.row(row) + col), load_pack<kWidth>(p.b + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Two<kWidth>& loaded) const {
    auto y = convert<float>(loaded.a);
    const auto b = convert<float>(loaded.b);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] += b[i];
    store_floats(p.y.row(row) + col, y);
  }
};

// The exact form of GELU is z Phi(z), without cancellation for large -z. Its slope is Phi(z) + z
// phi(z).
struct ExactForm {
  __device__ explicit ExactForm(float z) : z(z), below(0.5f * erfcf(-z * 0.707106781f)) {}
  __device__ float slope() const {
    constexpr float kDensity = 0.398942280f;  // 1 / sqrt(2 pi)
    return below + z * kDensity * expf(-0.5f * z * z);
  }
  float z, below;
};

// The tanh form of GELU is z sigmoid(2u), u = sqrt(2/pi) (z + c z^3), since (1 + tanh(u)) / 2 =
// sigmoid(2u). Beyond +-20 the sigmoid is 0 or 1, and z^3 need not be formed.
struct TanhForm {
  static constexpr float kTwiceRoot = 1.59576912f;  // 2 sqrt(2/pi)
  static constexpr float kCubic = 0.044715f;
  __device__ explicit TanhForm(float z) : z(fminf(fmaxf(z, -20.0f), 20.0f)) {
    const Sigmoids s(kTwiceRoot * this->z * (1.0f + kCubic * this->z * this->z));
    below = s.of_z;
    above = s.of_minus_z;
  }
  // (z s)' = s + z s (1 - s) (2u)'.
  __device__ float slope() const {
    return below + z * below * above * (kTwiceRoot * (1.0f + 3.0f * kCubic * z * z));
  }
  float z, below, above;  // sigmoid(2u), sigmoid(-2u)
};

template <typename Form>
struct BiasGeluOp {
  BiasGelu p;
  template <int kWidth>
  __device__ Two<kWidth> load(int64_t row, int64_t col) const {
    return {load_pack<kWidth>(p.x.row(row) + col), load_pack<kWidth>(p.b + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Two<kWidth>& loaded) const {
    auto y = convert<float>(loaded.a);
    const auto b = convert<float>(loaded.b);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const float z = y[i] + b[i];
      y[i] = z * Form(z).below;
    }
    store_floats(p.y.row(row) + col, y);
  }
};

template <typename Form>
struct BiasGeluBackwardOp {
  BiasGeluBackward p;
  template <int kWidth>
  __device__ Three<kWidth> load(int64_t row, int64_t col) const {
    return {load_pack<kWidth>(p.dy.row(row) + col), load_pack<kWidth>(p.x.row(row) + col),
            load_pack<kWidth>(p.b + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Three<kWidth>& loaded) const {
    auto dx = convert<float>(loaded.a);
    const auto x = convert<float>(loaded.b);
    const auto b = convert<float>(loaded.c);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) dx[i] *= Form(x[i] + b[i]).slope();
    store_floats(p.dx.row(row) + col, dx);
  }
};

constexpr int kActivationWidth = 8;
constexpr int kBiasThreads = 256;

// One part of the rows and up to kBiasThreads packs of columns. `lanes` threads share a row; each
// of the kBiasThreads / lanes slots walks its own rows, and slots are added in order.
template <int kWidth>
__global__ void __launch_bounds__(kBiasThreads)
    bias_backward_kernel(const BiasBackward p, int lanes) {
  __shared__ float shared[kBiasThreads * kWidth];
  const int lane = threadIdx.x % lanes;
  const int slot = threadIdx.x / lanes;
  const int slots = kBiasThreads / lanes;
  const int64_t col = (int64_t{blockIdx.y} * lanes + lane) * kWidth;
  const int64_t end = first_row(p.rows, blockIdx.x + 1);
  float sum[kWidth] = {};
  if (col < p.cols) {
#pragma unroll 4
    for (int64_t row = first_row(p.rows, blockIdx.x) + slot; row < end; row += slots) {
      const auto dy = load_floats<kWidth>(p.dy.row(row) + col);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += dy[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) shared[threadIdx.x * kWidth + i] = sum[i];
  __syncthreads();
  if (slot > 0 || col >= p.cols) return;
  for (int i = 0; i < kWidth; ++i) {
    float total = 0.0f;
    for (int s = 0; s < slots; ++s) total += shared[(s * lanes + lane) * kWidth + i];
    p.scratch[blockIdx.x * p.cols + col + i] = total;
  }
}

}  // namespace

void launch(cudaStream_t stream, const Swiglu& p) {
  const bool vectors = vectors_fit<kActivationWidth>(p.y, p.gate_up);
  if (p.amax != nullptr) {
    launch_elementwise_amax<kActivationWidth>(stream, "swiglu", p.amax, p.rows, p.cols, vectors,
                                              SwigluOp{p});
  } else if (p.early) {
    launch_elementwise_early<kActivationWidth>(stream, "swiglu", p.rows, p.cols, vectors,
                                               SwigluOp{p});
  } else {
    launch_elementwise<kActivationWidth>(stream, "swiglu", p.rows, p.cols, vectors, SwigluOp{p});
  }
}

void launch(cudaStream_t stream, const SwigluBackward& p) {
  const bool vectors = vectors_fit<kActivationWidth>(p.dgate_up, p.dy, p.gate_up);
  if (p.amax != nullptr) {
    launch_elementwise_amax<kActivationWidth>(stream, "swiglu_backward", p.amax, p.rows, p.cols,
                                              vectors, SwigluBackwardOp{p});
  } else {
    launch_elementwise<kActivationWidth>(stream, "swiglu_backward", p.rows, p.cols, vectors,
                                         SwigluBackwardOp{p});
  }
}

void launch(cudaStream_t stream, const BiasSigmoid& p) {
  const bool vectors = vectors_fit<kActivationWidth>(p.y, p.x, p.b);
  launch_elementwise<kActivationWidth>(stream, "bias_sigmoid", p.rows, p.cols, vectors,
                                       BiasSigmoidOp{p});
}

void launch(cudaStream_t stream, const SigmoidBackward& p) {
  const bool vectors = vectors_fit<kActivationWidth>(p.dx, p.dy, p.y);
  launch_elementwise<kActivationWidth>(stream, "sigmoid_backward", p.rows, p.cols, vectors,
                                       SigmoidBackwardOp{p});
}

void launch(cudaStream_t stream, const AddBias& p) {
  const bool vectors = vectors_fit<kActivationWidth>(p.y, p.b);
  launch_elementwise<kActivationWidth>(stream, "add_bias", p.rows, p.cols, vectors, AddBiasOp{p});
}

void launch(cudaStream_t stream, const BiasGelu& p) {
  const bool vectors = vectors_fit<kActivationWidth>(p.y, p.x, p.b);
  if (p.tanh_form) {
    launch_elementwise<kActivationWidth>(stream, "bias_gelu", p.rows, p.cols, vectors,
                                         BiasGeluOp<TanhForm>{p});
  } else {
    launch_elementwise<kActivationWidth>(stream, "bias_gelu", p.rows, p.cols, vectors,
                                         BiasGeluOp<ExactForm>{p});
  }
}

void launch(cudaStream_t stream, const BiasGeluBackward& p) {
  const bool vectors = vectors_fit<kActivationWidth>(p.dx, p.dy, p.x, p.b);
  if (p.tanh_form) {
    launch_elementwise<kActivationWidth>(stream, "bias_gelu_backward", p.rows, p.cols, vectors,
                                         BiasGeluBackwardOp<TanhForm>{p});
  } else {
    launch_elementwise<kActivationWidth>(stream, "bias_gelu_backward", p.rows, p.cols, vectors,
                                         BiasGeluBackwardOp<ExactForm>{p});
  }
}

void launch(cudaStream_t stream, const BiasBackward& p) {
  if (p.rows == 0 || p.cols == 0) return;
  const bool vectors = p.cols % kActivationWidth == 0 && vectors_fit<kActivationWidth>(p.dy);
  with_width<kActivationWidth>(vectors, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    const int64_t packs = p.cols / kPackWidth;
    int lanes = 1;
    while (lanes < packs && lanes < kBiasThreads) lanes *= 2;
    const dim3 grid(kTokenParts, blocks(packs, lanes));
    bias_backward_kernel<kPackWidth><<<grid, kBiasThreads, 0, stream>>>(p, lanes);
  });
  check_launch("bias_backward");
  add_parts(stream, p.db, p.scratch, p.cols, p.cols);
}

}  // namespace sbtrain::kernels
