#include "ops/cpu/blas.h"

#include <omp.h>

#include <algorithm>

#include "ops/cpu/openblas.h"

namespace sbtrain::ops::cpu {
namespace {

// How a product is cut into parts, so that its bits do not depend on the number of threads.
// OpenBLAS adds up each element of the result in an order that depends on the element's place in a
// tile, and on the size of the product. The order stays what it is in the whole product
// - where rows are cut at multiples of kRowTile, which every tile of its kernels divides,
// - where a part is not so small that OpenBLAS has other kernels for it (10^6 multiply-adds on some
//   processors), and has more than the single row that is computed as a matrix times a vector.
// No such rule holds for columns, so they are cut only where rows are few, and by the shape alone.
constexpr int64_t kRowTile = 48;
constexpr int64_t kWorkOfPart = int64_t{1} << 20;
constexpr int64_t kFewRows = 8 * kRowTile;
constexpr int64_t kColumnsOfPart = 512;

// OpenBLAS's OpenMP build starts threads of its own for products above these sizes, unless it is
// called in a parallel region.
constexpr int64_t kLargeProduct = int64_t{1} << 18;  // multiply-adds
constexpr int64_t kLargeProductOfVector = 9216;

int64_t row_tiles(int64_t m) {
  return (m + kRowTile - 1) / kRowTile;
}

// Where part `index` of `parts` begins.
int64_t row_begin(int64_t m, int64_t index, int64_t parts) {
  return std::min(m, kRowTile * (row_tiles(m) * index / parts));
}
int64_t column_begin(int64_t n, int64_t index, int64_t parts) {
  return n * index / parts;
}

int64_t column_parts(int64_t m, int64_t n) {
  return m < kFewRows ? std::clamp<int64_t>(n / kColumnsOfPart, 1, 16) : 1;
}

// As many parts as there are threads, if the smallest is still as large as described above.
int64_t row_parts(int64_t m, int64_t n, int64_t k, int threads) {
  for (int64_t parts = std::min<int64_t>(threads, row_tiles(m)); parts > 1; --parts) {
    const int64_t last = m - row_begin(m, parts - 1, parts);  // the one whose last tile may be cut
    const int64_t whole = kRowTile * (row_tiles(m) / parts);
    if (last > 1 && std::min(last, whole) * n * k >= kWorkOfPart) return parts;
  }
  return 1;
}

CBLAS_TRANSPOSE cblas(Transpose t) {
  return t == Transpose::kYes ? CblasTrans : CblasNoTrans;
}

}  // namespace

void gemm_serial(Transpose trans_a, Transpose trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                 const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                 int64_t ldc) {
  if (m == 0 || n == 0) return;
  const OpenBlas& blas = openblas();
  const auto i32 = [](int64_t value) { return static_cast<int>(value); };
  if (m == 1 && trans_a == Transpose::kNo) {  // not worth packing B
    if (beta == 0.0f) std::fill(c, c + n, 0.0f);
    const bool by_rows = trans_b == Transpose::kYes;
    blas.sgemv(CblasRowMajor, by_rows ? CblasNoTrans : CblasTrans, i32(by_rows ? n : k),
               i32(by_rows ? k : n), alpha, b, i32(ldb), a, 1, beta == 0.0f ? 1.0f : beta, c, 1);
    return;
  }
  blas.sgemm(CblasRowMajor, cblas(trans_a), cblas(trans_b), i32(m), i32(n), i32(k), alpha, a,
             i32(lda), b, i32(ldb), beta, c, i32(ldc));
}

void gemm(Transpose trans_a, Transpose trans_b, int64_t m, int64_t n, int64_t k, float alpha,
          const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
          int64_t ldc) {
  const int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  const int64_t cols = column_parts(m, n);
  const int64_t rows = row_parts(m, n / cols, k, threads);
  const auto multiply = [&](int64_t part) {
    const int64_t m0 = row_begin(m, part / cols, rows);
    const int64_t n0 = column_begin(n, part % cols, cols);
    const int64_t part_m = row_begin(m, part / cols + 1, rows) - m0;
    const int64_t part_n = column_begin(n, part % cols + 1, cols) - n0;
    const float* part_a = a + (trans_a == Transpose::kYes ? m0 : m0 * lda);
    const float* part_b = b + (trans_b == Transpose::kYes ? n0 * ldb : n0);
    gemm_serial(trans_a, trans_b, part_m, part_n, k, alpha, part_a, lda, part_b, ldb, beta,
                c + m0 * ldc + n0, ldc);
  };
  const int64_t parts = rows * cols;
  if (threads == 1 || m * n * k <= (m == 1 ? kLargeProductOfVector : kLargeProduct)) {
    for (int64_t part = 0; part < parts; ++part) multiply(part);
    return;
  }
  openblas();  // loaded here: a failure to load must not be thrown inside the parallel region
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < parts; ++part) multiply(part);
}

}  // namespace sbtrain::ops::cpu
