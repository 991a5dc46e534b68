#include "kernels/elementwise.cuh"
#include "kernels/memory.h"

namespace sbtrain::kernels {
namespace {

struct Nothing {};

template <typename T>
struct FillOp {
  Matrix<T> x;
  T value;
  template <int kWidth>
  __device__ Nothing load(int64_t /*row*/, int64_t /*col*/) const {
    return {};
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, Nothing /*loaded*/) const {
    Pack<T, kWidth> pack;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) pack[i] = value;
    store_pack(x.row(row) + col, pack);
  }
};

template <typename Y, typename X>
struct CopyOp {
  Matrix<Y> y;
  Matrix<const X> x;
  template <int kWidth>
  __device__ Pack<X, kWidth> load(int64_t row, int64_t col) const {
    return load_pack<kWidth>(x.row(row) + col);
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Pack<X, kWidth>& loaded) const {
    store_pack(y.row(row) + col, convert<Y>(loaded));
  }
};

template <typename Y, typename X>
struct AddOp {
  Matrix<Y> y;
  Matrix<const X> x;
  template <int kWidth>
  struct Loaded {
    Pack<Y, kWidth> y;
    Pack<X, kWidth> x;
  };
  template <int kWidth>
  __device__ Loaded<kWidth> load(int64_t row, int64_t col) const {
    return {load_pack<kWidth>(y.row(row) + col), load_pack<kWidth>(x.row(row) + col)};
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Loaded<kWidth>& loaded) const {
    auto sum = convert<float>(loaded.y);
    const auto other = convert<float>(loaded.x);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) sum[i] += other[i];
    store_floats(y.row(row) + col, sum);
  }
};

template <typename X>
struct SumPartsOp {
  float* y;
  Matrix<const X> x;
  const X* own_row;
  int64_t own, rows;
  bool add;
  __device__ const X* row(int64_t r) const { return r == own ? own_row : x.row(r); }
  template <int kWidth>
  __device__ Pack<float, kWidth> load(int64_t /*row*/, int64_t col) const {
    auto sum = convert<float>(load_pack<kWidth>(row(0) + col));
    for (int64_t r = 1; r < rows; ++r) {
      const auto term = convert<float>(load_pack<kWidth>(row(r) + col));
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += term[i];
    }
    if (!add) return sum;
    auto before = load_pack<kWidth>(y + col);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) before[i] += sum[i];
    return before;
  }
  template <int kWidth>
  __device__ void store(int64_t /*row*/, int64_t col, const Pack<float, kWidth>& sum) const {
    store_pack(y + col, sum);
  }
};

template <typename X>
void sum_parts_typed(cudaStream_t stream, const SumParts& p) {
  constexpr int kWidth = 4;  // 16 bytes of y
  const Matrix<const X> x{static_cast<const X*>(p.x.data), p.x.stride};
  const auto* own_row = static_cast<const X*>(p.own_row);
  const bool vectors = vectors_fit<kWidth>(x, Matrix<const X>{own_row, 0}, Matrix<float>{p.y, 0});
  launch_elementwise<kWidth>(stream, "sum_parts", 1, p.cols, vectors,
                             SumPartsOp<X>{p.y, x, own_row, p.own, p.rows, p.add});
}

template <typename T>
void fill_typed(cudaStream_t stream, const Fill& p, T value) {
  constexpr int kWidth = 16 / sizeof(T);
  const bool flat = p.x.stride == p.cols;
  const Matrix<T> x{static_cast<T*>(p.x.data), flat ? 0 : p.x.stride};
  launch_elementwise<kWidth>(stream, "fill", flat ? 1 : p.rows, flat ? p.rows * p.cols : p.cols,
                             vectors_fit<kWidth>(x), FillOp<T>{x, value});
}

template <template <typename, typename> typename Op, typename Y, typename X>
void binary(cudaStream_t stream, const char* name, const Copy& p) {
  // 16 bytes of the larger type: neighbouring threads read neighbouring 16 bytes.
  constexpr int kWidth = 16 / std::max(sizeof(Y), sizeof(X));
  const bool flat = p.y.stride == p.cols && p.x.stride == p.cols;
  const Matrix<Y> y{static_cast<Y*>(p.y.data), flat ? 0 : p.y.stride};
  const Matrix<const X> x{static_cast<const X*>(p.x.data), flat ? 0 : p.x.stride};
  const bool vectors = vectors_fit<kWidth>(y, x);
  launch_elementwise<kWidth>(stream, name, flat ? 1 : p.rows, flat ? p.rows * p.cols : p.cols,
                             vectors, Op<Y, X>{y, x});
}

template <template <typename, typename> typename Op>
void binary_reals(cudaStream_t stream, const char* name, const Copy& p) {
  const auto real = [](Type type) { return type == Type::kF32 || type == Type::kBF16; };
  if (!real(p.y_type) || !real(p.x_type)) {
    throw_invalid_argument("%s: no such combination of types", name);
  }
  const bool y_f32 = p.y_type == Type::kF32;
  const bool x_f32 = p.x_type == Type::kF32;
  if (y_f32 && x_f32) return binary<Op, float, float>(stream, name, p);
  if (y_f32) return binary<Op, float, bf16>(stream, name, p);
  if (x_f32) return binary<Op, bf16, float>(stream, name, p);
  binary<Op, bf16, bf16>(stream, name, p);
}

}  // namespace

void launch(cudaStream_t stream, const Fill& p) {
  switch (p.type) {
    case Type::kF32:
      return fill_typed(stream, p, p.value);
    case Type::kBF16:
      return fill_typed(stream, p, __float2bfloat16_rn(p.value));
    case Type::kI32:
      return fill_typed(stream, p, static_cast<int32_t>(p.value));
    case Type::kF64:
      return fill_typed(stream, p, static_cast<double>(p.value));
    default:
      throw_invalid_argument("fill: no such type");
  }
}

void launch(cudaStream_t stream, const Copy& p) {
  if (p.y_type == Type::kI32 && p.x_type == Type::kI32) {
    return binary<CopyOp, int32_t, int32_t>(stream, "copy", p);
  }
  if (p.y_type == Type::kF64 && p.x_type == Type::kF64) {
    return binary<CopyOp, double, double>(stream, "copy", p);
  }
  binary_reals<CopyOp>(stream, "copy", p);
}

void launch(cudaStream_t stream, const Add& p) {
  binary_reals<AddOp>(stream, "add", p);
}

void launch(cudaStream_t stream, const SumParts& p) {
  if (p.type == Type::kF32) return sum_parts_typed<float>(stream, p);
  if (p.type == Type::kBF16) return sum_parts_typed<bf16>(stream, p);
  throw_invalid_argument("sum_parts: no such type");
}

}  // namespace sbtrain::kernels
