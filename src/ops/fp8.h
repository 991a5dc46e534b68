// Products of matrices in fp8, and the casts in front of them.
//
// A matrix in fp8 has one scale: x is held as round(x * scale), where scale = max / amax(x), max is
// the largest number of the format and amax the largest absolute value of x now ("current
// scaling"). What goes along with it is 1 / scale. Formats and the scale's special cases:
// core/fp8.h.
#pragma once

#include "core/fp8.h"
#include "kernels/fp8.h"
#include "ops/scratch.h"

namespace sbtrain::ops {

// amax_1 (f32) = the largest |x|; NaN if any x is NaN, 0 if there is none.
struct Amax {
  static constexpr std::string_view kName = "amax";
  Tensor amax_1;
  Tensor x_RC;
  void check() const {
    Check(kName).flat("amax_1", amax_1, 1, DType::kF32);
    Check(kName).matrix("x_RC", x_RC);
  }
  kernels::Amax kernel() const { return {amax_1, x_RC, x_RC.dtype, x_RC.rows(), x_RC.cols()}; }
};

// y_RC = x_RC in fp8 and y_CR = its transpose, of which one may be left out, with
// inverse_scale_1 (f32). amax_1 is that of x, or a bound of it.
struct CastFp8 {
  static constexpr std::string_view kName = "cast_fp8";
  Tensor y_RC{}, y_CR{};
  Tensor inverse_scale_1;
  Tensor x_RC;
  Tensor amax_1;
  DType dtype() const { return y_RC.defined() ? y_RC.dtype : y_CR.dtype; }
  void check() const {
    const Check c(kName);
    c.that(is_fp8(dtype()), "y must be e4m3 or e5m2");
    c.matrix("x_RC", x_RC);
    if (y_RC.defined()) c.matrix("y_RC", y_RC, x_RC.rows(), x_RC.cols(), dtype());
    if (y_CR.defined()) c.matrix("y_CR", y_CR, x_RC.cols(), x_RC.rows(), dtype());
    c.flat("inverse_scale_1", inverse_scale_1, 1, DType::kF32);
    c.flat("amax_1", amax_1, 1, DType::kF32);
  }
  kernels::CastFp8 kernel() const {
    return {y_RC,       y_CR,   dtype(),     inverse_scale_1, x_RC,
            x_RC.dtype, amax_1, x_RC.rows(), x_RC.cols()};
  }
};

// Of the largest absolute values x_WN (f32) that W ranks found in their parts of N matrices: amax_N
// of the whole matrices, NaN if a part has one, and their inverse scales in e4m3 (both f32).
struct Fp8Scales {
  static constexpr std::string_view kName = "fp8_scales";
  Tensor amax_N, inverse_scale_N1;
  Tensor x_WN;
  void check() const {
    const Check c(kName);
    c.matrix("x_WN", x_WN, x_WN.rows(), x_WN.cols(), DType::kF32);
    c.flat("amax_N", amax_N, x_WN.cols(), DType::kF32);
    c.matrix("inverse_scale_N1", inverse_scale_N1, x_WN.cols(), 1, DType::kF32);
  }
  kernels::Fp8Scales kernel() const {
    return {amax_N, inverse_scale_N1, x_WN, x_WN.rows(), x_WN.cols()};
  }
};

// y_CR = the transpose of x_RC, both in the same format.
struct TransposeFp8 {
  static constexpr std::string_view kName = "transpose_fp8";
  Tensor y_CR;
  Tensor x_RC;
  void check() const {
    const Check c(kName);
    c.that(is_fp8(x_RC.dtype), "x must be e4m3 or e5m2");
    c.same("x_RC", x_RC, x_RC);
    c.matrix("y_CR", y_CR, x_RC.cols(), x_RC.rows(), x_RC.dtype);
  }
  kernels::TransposeFp8 kernel() const { return {y_CR, x_RC, x_RC.rows(), x_RC.cols()}; }
};

// A matrix in fp8 as a product takes it.
struct Fp8Matrix {
  Tensor x;                // e4m3 or e5m2
  Tensor inverse_scale_1;  // f32, at a multiple of 16 bytes
};

// y_MN = alpha * a_MK b_NK^T (+ residual_MN): both factors have the inner dimension contiguous. y
// is f32 or bf16, at most one factor is e5m2. M, N and K are multiples of kFp8Multiple.
struct Fp8Product {
  static constexpr std::string_view kName = "fp8_product";
  struct Scratch {
    Buffer a_MK, b_NK;  // f32, on the CPU
    Buffer workspace;
  };
  Tensor y_MN;
  Fp8Matrix a_MK, b_NK;
  float alpha = 1.0f;
  Tensor residual{};  // same shape as y, may be y itself
  // Whether tensor cores may add up in their own accumulator of about 14 bits of mantissa for the
  // whole of K, as they do fastest, instead of moving partial sums to f32 on the way.
  bool fast_accumulation = true;
  void check() const {
    const Check c(kName);
    const Tensor &a = a_MK.x, &b = b_NK.x;
    c.that(is_fp8(a.dtype) && is_fp8(b.dtype), "the factors must be e4m3 or e5m2");
    c.that(a.dtype == DType::kE4M3 || b.dtype == DType::kE4M3, "both factors are e5m2");
    c.matrix("a_MK", a, y_MN.rows(), b.cols(), a.dtype);
    c.matrix("b_NK", b, y_MN.cols(), a.cols(), b.dtype);
    c.matrix("y_MN", y_MN);
    c.flat("inverse scale of a", a_MK.inverse_scale_1, 1, DType::kF32);
    c.flat("inverse scale of b", b_NK.inverse_scale_1, 1, DType::kF32);
    for (const Fp8Matrix* factor : {&a_MK, &b_NK}) {
      c.that(reinterpret_cast<uintptr_t>(factor->inverse_scale_1.data) %
                     (kFp8ScaleStride * sizeof(float)) ==
                 0,
             "a scale does not begin at a multiple of 16 bytes, as cuBLASLt needs it");
    }
    if (residual.defined()) c.same("residual", residual, y_MN);
    c.that(y_MN.rows() % kFp8Multiple == 0 && y_MN.cols() % kFp8Multiple == 0 &&
               a.cols() % kFp8Multiple == 0,
           "M, N and K must be multiples of 16");
  }
  void check_limits(const Target& target) const {
    if (target.sm >= 89) return;
    fail(ExitCode::kConfig,
         "fp8 products need compute capability 8.9 or newer, and this GPU has {}.{}; set "
         "train.precision: bf16",
         target.sm / 10, target.sm % 10);
  }
  Scratch scratch(const Stream& s) const {
    if (on_cuda(s)) return {.a_MK = {}, .b_NK = {}, .workspace = linear_workspace(s)};
    const auto wide = [&](std::string_view name, const Tensor& x) {
      return s.scratch(name, DType::kF32, {x.rows(), x.cols()});
    };
    return {.a_MK = wide("a of fp8", a_MK.x), .b_NK = wide("b of fp8", b_NK.x), .workspace = {}};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const Amax& op);
void run(Cpu, Stream& s, const CastFp8& op);
void run(Cpu, Stream& s, const Fp8Scales& op);
void run(Cpu, Stream& s, const TransposeFp8& op);
void run(Cpu, Stream& s, const Fp8Product& op, const Fp8Product::Scratch& scratch);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const Fp8Product& op, const Fp8Product::Scratch& scratch);
}  // namespace cuda

}  // namespace sbtrain::ops
