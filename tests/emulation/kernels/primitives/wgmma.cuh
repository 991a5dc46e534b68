// Replaces wgmma (emulation/emulator.h). Lane 0 computes the warp's 16 rows of a product when its
// group completes, from the registers and the shared memory of that moment.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/primitives/accumulator.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/tile.cuh"

namespace sbtrain::kernels {

inline void wgmma_fence() {}
inline void wgmma_commit() {
  emulation::commit_products();
}
template <int kPending>
void wait_for_products() {
  emulation::wait_for_products(kPending);
}

// The functions of the emulator are opaque to the compiler, so nothing has to be pinned.
template <int kColumns>
struct WarpgroupAccumulator : Accumulator<1, kColumns / 8> {
  void pin() {}
};
template <int kInner>
struct WarpgroupOperand {
  uint32_t at[kInner / 16][4];
  void pin() {}
};

enum class Descriptors : uint8_t { kKept, kFormed, kStepped };
enum class TileUse : int { kRows = 0, kColumns = 1 };

template <int kRows, int kCols, TileUse kUse, Descriptors kDescriptors = Descriptors::kKept>
class TileOperand {
 public:
  explicit TileOperand(const void* tile) : tile_(static_cast<const __nv_bfloat16*>(tile)) {
    emulation::check(shared_address(tile) % 1024 == 0, "a tile that is not aligned to 1024 bytes");
  }
  // The element at these indices of the inner dimension of the product and of the other one.
  float at(int inner, int outer) const {
    constexpr int kPanel = kCols < 64 ? kCols : 64;
    const int row = kUse == TileUse::kRows ? outer : inner;
    const int col = kUse == TileUse::kRows ? inner : outer;
    const __nv_bfloat16* const panel = tile_ + col / kPanel * kRows * kPanel;
    return __bfloat162float(panel[tile_offset<kPanel>(row, col % kPanel / 8) + col % 8]);
  }

 private:
  const __nv_bfloat16* tile_;
};

// Computes c = a b, or c += a b with `add`, where c is what the 32 lanes hold of [16, kCols] and
// a_of(row, k) and b_of(k, col) are elements of the operands.
template <int kInner, int kCols, typename A, typename B>
void compute_product(const std::array<WarpgroupAccumulator<kCols>*, 32>& c, bool add, const A& a_of,
                     const B& b_of) {
  static thread_local float b[kInner][kCols];
  for (int k = 0; k < kInner; ++k) {
    for (int col = 0; col < kCols; ++col) b[k][col] = b_of(k, col);
  }
  for (int row = 0; row < 16; ++row) {
    float sums[kCols] = {};
    for (int k = 0; k < kInner; ++k) {
      const float a = a_of(row, k);
#pragma omp simd
      for (int col = 0; col < kCols; ++col) sums[col] += a * b[k][col];
    }
    for (int col = 0; col < kCols; ++col) {
      WarpgroupAccumulator<kCols>& lane = *c[static_cast<size_t>(row % 8 * 4 + col % 8 / 2)];
      float& x = lane.at[0][col / 8][row / 8 * 2 + col % 2];
      x = sums[col] + (add ? x : 0.0f);
    }
  }
}

// The addresses that the lanes of the warp give.
template <typename T>
std::array<T*, 32> of_all_lanes(T& x) {
  const uint64_t* const all = emulation::exchange(reinterpret_cast<uint64_t>(&x));
  std::array<T*, 32> pointers;
  for (size_t i = 0; i < 32; ++i) pointers[i] = reinterpret_cast<T*>(all[i]);
  return pointers;
}

template <int kInner, int kCols, typename A, typename B>
void issue_product(WarpgroupAccumulator<kCols>& c, const A& a, const B& b, bool add = false,
                   int a_outer = 0, int b_outer = 0) {
  const auto lanes = of_all_lanes(c);
  if (lane() != 0) return;
  const int first_row = a_outer + static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  emulation::issue_product([=] {
    compute_product<kInner>(
        lanes, add, [&](int row, int k) { return a.at(k, first_row + row); },
        [&](int k, int col) { return b.at(k, b_outer + col); });
  });
}

template <int kInner, int kCols, typename B>
void issue_product(WarpgroupAccumulator<kCols>& c, const WarpgroupOperand<kInner>& a, const B& b) {
  const auto lanes = of_all_lanes(c);
  const auto operands = of_all_lanes(a);
  if (lane() != 0) return;
  emulation::issue_product([=] {
    compute_product<kInner>(
        lanes, true,
        [&](int row, int k) {
          const uint32_t pair = operands[static_cast<size_t>(row % 8 * 4 + k % 8 / 2)]
                                    ->at[k / 16][k % 16 / 8 * 2 + row / 8];
          return __uint_as_float(k % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
        },
        [&](int k, int col) { return b.at(k, col); });
  });
}

}  // namespace sbtrain::kernels
