#include "ops/cpu/blas.h"

#include <omp.h>

#include <algorithm>

#include "ops/cpu/openblas.h"

namespace sbtrain::ops::cpu {
namespace {

// Part boundaries fall on multiples of this, the largest tile side of OpenBLAS's micro-kernels.
constexpr int64_t kTile = 16;
// Below this many multiply-adds for each thread, waking it costs more than it saves.
constexpr int64_t kWorkPerThread = int64_t{1} << 17;

int64_t tiles(int64_t n) {
  return (n + kTile - 1) / kTile;
}

struct Grid {
  int rows = 1;
  int cols = 1;
};

// The grid of at most `parts` rectangles whose largest one costs least. A rectangle costs its
// multiply-adds plus the packing of its two inputs, which OpenBLAS does once per call.
Grid choose_grid(int64_t m, int64_t n, int parts) {
  constexpr int64_t kPacking = 24;  // cost of packing one element, in multiply-adds
  Grid best;
  int64_t best_cost = 0;
  for (int rows = 1; rows <= parts; ++rows) {
    const Grid grid{rows, parts / rows};
    const int64_t part_m = kTile * ((tiles(m) + grid.rows - 1) / grid.rows);
    const int64_t part_n = kTile * ((tiles(n) + grid.cols - 1) / grid.cols);
    const int64_t cost = part_m * part_n + kPacking * (part_m + part_n);
    if (rows == 1 || cost < best_cost) {
      best = grid;
      best_cost = cost;
    }
  }
  return best;
}

// Where part `index` of `parts` of [0, n) begins.
int64_t part_begin(int64_t n, int index, int parts) {
  return std::min(n, kTile * (tiles(n) * index / parts));
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
  const int64_t work = m * n * std::max<int64_t>(k, 1);
  const auto parts = static_cast<int>(
      std::clamp<int64_t>(work / kWorkPerThread, 1, omp_in_parallel() ? 1 : omp_get_max_threads()));
  if (parts == 1) {
    gemm_serial(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  openblas();  // loaded here: a failure to load must not be thrown inside the parallel region
  const Grid grid = choose_grid(m, n, parts);
#pragma omp parallel for schedule(static)
  for (int part = 0; part < grid.rows * grid.cols; ++part) {
    const int row = part / grid.cols;
    const int col = part % grid.cols;
    const int64_t m0 = part_begin(m, row, grid.rows);
    const int64_t n0 = part_begin(n, col, grid.cols);
    const int64_t part_m = part_begin(m, row + 1, grid.rows) - m0;
    const int64_t part_n = part_begin(n, col + 1, grid.cols) - n0;
    const float* part_a = a + (trans_a == Transpose::kYes ? m0 : m0 * lda);
    const float* part_b = b + (trans_b == Transpose::kYes ? n0 * ldb : n0);
    gemm_serial(trans_a, trans_b, part_m, part_n, k, alpha, part_a, lda, part_b, ldb, beta,
                c + m0 * ldc + n0, ldc);
  }
}

}  // namespace sbtrain::ops::cpu
