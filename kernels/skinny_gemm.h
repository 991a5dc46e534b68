// Skinny matrix products (GEMM), of a few rows with a matrix, as decoding makes them: they read the
// whole matrix for little arithmetic.
#pragma once

#include "kernels/scratch_sizes.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

// y [rows, n] = alpha * norm(x) [rows, k] w^T (+ residual [rows, n]); at most kSkinnyRows rows. x
// and w are bf16, y and residual bf16 or f32. Sums are f32, and their order depends on k alone, so
// a row's bits are the same whatever the other rows are and however many. Sources: skinny_gemm.cu,
// gemv.cu and skinny_gemm_wide.cu.
//
// norm is the RMSNorm of kernels/norm.h if norm_w is given, else nothing. For one row it is part
// of the kernel; more have a kernel of its own, with the same bits, so that not every block repeats
// it.
//
// Without swiglu, w is [n, k]. With it, w is [2 n, k]: first the rows of gates, then those of
// values; their products are rounded to the type of y, and y = gate sigmoid(gate) value. There is
// no residual then.
struct SkinnyGemm {
  Type type;  // of y and residual
  Matrix<void> y;
  Matrix<const bf16> x, w;
  Matrix<const void> residual;  // null: none; may be y
  int64_t rows, n, k;
  float alpha;
  // Begins before the kernel in front of it has ended (dependent_launch.cuh), and reads w and
  // norm_w then: no kernel since the last one that was launched plainly may have written them.
  bool early;
  const bf16* norm_w = nullptr;  // [k]
  float norm_eps = 0.0f;
  Matrix<bf16> normed = {};  // scratch [rows, k] for the norm
  bool swiglu = false;
};
void skinny_gemm(cudaStream_t stream, const SkinnyGemm& p);

}  // namespace sbtrain::kernels
