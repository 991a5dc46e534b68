// Matrix products in fp32, row-major: on OpenBLAS, and skinny ones.
#pragma once

#include <cstdint>

namespace sbtrain::ops::cpu {

enum class Transpose : uint8_t { kNo, kYes };

// C_MN = alpha * op(A)_MK op(B)_KN + beta * C_MN, where op transposes with kYes. `lda`, `ldb` and
// `ldc` are the elements between rows as the matrices lie in memory (A is [K, M] with kYes).
// With beta = 0 C is never read, so it may hold NaN.
//
// gemm_serial runs on the calling thread and may be called inside parallel regions.
void gemm_serial(Transpose trans_a, Transpose trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                 const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                 int64_t ldc);

// The same, shared by all OpenMP threads when called outside of parallel regions. The bits of the
// result do not depend on the number of threads.
void gemm(Transpose trans_a, Transpose trans_b, int64_t m, int64_t n, int64_t k, float alpha,
          const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
          int64_t ldc);

// Skinny products, of a few rows with a matrix, as decoding makes them: they read the whole matrix
// for little arithmetic, and a row may share its product with any number of others.

// Above this, the products of OpenBLAS are faster.
inline constexpr int64_t kSkinnyRows = 64;

// y_MN = alpha * x_MK w_NK^T, or += with `add`. `ldx`, `ldw` and `ldy` are the elements between
// rows. Each element of y is summed in an order that depends on K alone, so its bits are the same
// whatever the other rows are, however many there are, and whatever the number of threads.
void skinny_gemm(int64_t m, int64_t n, int64_t k, float alpha, const float* x, int64_t ldx,
                 const float* w, int64_t ldw, bool add, float* y, int64_t ldy);

}  // namespace sbtrain::ops::cpu
