// Skinny matrix products (GEMM), of a few rows with a matrix, as decoding makes them: they read the
// whole matrix for little arithmetic, and a row may share its product with any number of others.
#pragma once

#include <cstdint>

namespace sbtrain::ops::cpu {

// Above this, the products of OpenBLAS are faster.
inline constexpr int64_t kSkinnyRows = 64;

// y_MN = alpha * x_MK w_NK^T, or += with `add`. `ldx`, `ldw` and `ldy` are the elements between
// rows. Each element of y is summed in an order that depends on K alone, so its bits are the same
// whatever the other rows are, however many there are, and whatever the number of threads.
void skinny_gemm(int64_t m, int64_t n, int64_t k, float alpha, const float* x, int64_t ldx,
                 const float* w, int64_t ldw, bool add, float* y, int64_t ldy);

}  // namespace sbtrain::ops::cpu
