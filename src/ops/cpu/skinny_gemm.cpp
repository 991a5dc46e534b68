#include <omp.h>

#include <algorithm>
#include <cstring>

#include "ops/cpu/blas.h"
#include "ops/cpu/lanes.h"

namespace sbtrain::ops::cpu {
namespace {

// Rows of x and of w whose products are computed together: their sums fill half of the registers.
constexpr int64_t kTileM = 4;
constexpr int64_t kTileN = 4;

// How many rows of w ahead are fetched. Beyond the last, addresses are fetched that nobody reads.
constexpr int64_t kRowsAhead = 3 * kTileN;

// Multiply-adds of each thread, of which a product needs at least so many to be worth sharing. One
// core computes them in 1 us from its L2 cache; the more threads there are, the longer it takes to
// wake them and to wait for the last.
constexpr int64_t kWorkOfThread = int64_t{1} << 14;

// The first `count` lanes, and zeros.
Lanes load_part(const float* x, int64_t count) {
  Lanes lanes{};
  std::memcpy(&lanes, x, static_cast<size_t>(count) * sizeof(float));
  return lanes;
}

// Which lanes are the `first` one or later.
auto lanes_from(int64_t first) {
  Lanes index;
  for (int lane = 0; lane < kLanes; ++lane) index[lane] = static_cast<float>(lane);
  return index >= static_cast<float>(first);
}

using Four = float __attribute__((vector_size(4 * sizeof(float))));

// Lanes added up in pairs until four are left.
Four fold(const Lanes& x) {
#if defined(__AVX512F__)
  const auto half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const Lanes& half = x;
#endif
#if defined(__AVX__)
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
         __builtin_shufflevector(half, half, 4, 5, 6, 7);
#else
  return half;
#endif
}

float sum(const Lanes& x) {
  const Four four = fold(x);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// sum() of four at once.
Four sum(const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d) {
  const auto pairs = [](const Four& x, const Four& y) {
    return __builtin_shufflevector(x, y, 0, 4, 1, 5) + __builtin_shufflevector(x, y, 2, 6, 3, 7);
  };
  const Four ab = pairs(fold(a), fold(b));
  const Four cd = pairs(fold(c), fold(d));
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

struct Product {
  int64_t k;
  float alpha;
  const float* x;
  int64_t ldx;
  const float* w;
  int64_t ldw;
  bool add;
  float* y;
  int64_t ldy;
};

// y[0] to y[N) = the sums.
template <int64_t N>
void store(const Product& p, float* y, const Lanes* sums) {
  const auto put = [&](float* at, float sum) { *at = p.add ? *at + p.alpha * sum : p.alpha * sum; };
  if constexpr (N == 4) {
    const Four four = sum(sums[0], sums[1], sums[2], sums[3]);
    for (int c = 0; c < 4; ++c) put(y + c, four[c]);
  } else {
    for (int64_t c = 0; c < N; ++c) put(y + c, sum(sums[c]));
  }
}

// The elements [row, row + M) x [column, column + N) of y. The loops over M and N are unrolled, so
// that all sums are in registers.
template <int64_t M, int64_t N>
void multiply_tile(const Product& p, int64_t row, int64_t column) {
  const float* x = p.x + row * p.ldx;
  const float* w = p.w + column * p.ldw;
  Lanes sums[M][N] = {};  // NOLINT: an array of registers
  const auto add_products = [&](const auto& load, int64_t i) {
    Lanes of_w[N];  // NOLINT: an array of registers
#pragma GCC unroll 4
    for (int64_t c = 0; c < N; ++c) {
      of_w[c] = load(w + c * p.ldw + i);
      // A single row of x waits for w alone, whose rows are too short for the processor to foresee.
      if constexpr (M == 1) __builtin_prefetch(w + (c + kRowsAhead) * p.ldw + i);
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < M; ++r) {
      const Lanes of_x = load(x + r * p.ldx + i);
#pragma GCC unroll 4
      for (int64_t c = 0; c < N; ++c) sums[r][c] += of_x * of_w[c];
    }
  };
  const int64_t whole = p.k / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) add_products(load_lanes, i);
  if (whole < p.k && p.k < kLanes) {
    add_products([&](const float* from) { return load_part(from, p.k); }, 0);
  } else if (whole < p.k) {
    // The last whole lanes of a row, without those that have been added already.
    const auto rest = lanes_from(kLanes - (p.k - whole));
    const auto load = [&](const float* from) { return rest ? load_lanes(from) : Lanes{}; };
    add_products(load, p.k - kLanes);
  }
#pragma GCC unroll 4
  for (int64_t r = 0; r < M; ++r) store<N>(p, p.y + (row + r) * p.ldy + column, sums[r]);
}

template <int64_t N>
void multiply_columns(const Product& p, int64_t m, int64_t column) {
  int64_t row = 0;
  for (; row + kTileM <= m; row += kTileM) multiply_tile<kTileM, N>(p, row, column);
  for (; row < m; ++row) multiply_tile<1, N>(p, row, column);
}

void multiply_range(const Product& p, int64_t m, int64_t begin, int64_t end) {
  int64_t column = begin;
  for (; column + kTileN <= end; column += kTileN) multiply_columns<kTileN>(p, m, column);
  for (; column < end; ++column) multiply_columns<1>(p, m, column);
}

}  // namespace

void skinny_gemm(int64_t m, int64_t n, int64_t k, float alpha, const float* x, int64_t ldx,
                 const float* w, int64_t ldw, bool add, float* y, int64_t ldy) {
  const Product p = {k, alpha, x, ldx, w, ldw, add, y, ldy};
  const int64_t parts = omp_get_max_threads();
  if (m * n * k < parts * kWorkOfThread || omp_in_parallel() || parts == 1) {
    multiply_range(p, m, 0, n);
    return;
  }
  const int64_t tiles = (n + kTileN - 1) / kTileN;
#pragma omp parallel for schedule(static)
  for (int64_t part = 0; part < parts; ++part) {
    multiply_range(p, m, std::min(n, tiles * part / parts * kTileN),
                   std::min(n, tiles * (part + 1) / parts * kTileN));
  }
}

}  // namespace sbtrain::ops::cpu
