// Asynchronous products of one warpgroup on tensor cores (wgmma), sm_90a: c [64, N] += a [64, 16]
// b [16, N] in bf16 with f32 sums.
//
// Operands in shared memory are tiles whose rows are 64 or 128 bytes, swizzled as TMA writes them
// (tensor_map.h), aligned to 1024 bytes. A tile [rows, columns] is read in one of two ways:
//   Rows     the columns are the inner dimension of the product (x y^T: a = x, b = y);
//   Columns  the rows are the inner dimension (x^T y: a = x, b = y; p x: b = x).
// Warp w of the warpgroup holds rows 16 w to 16 w + 15 of c as mma.cuh describes C, blocks of eight
// columns side by side, and of an operand a in registers the same rows as mma.cuh describes A.
//
// The products that are issued between two commits form a group. Until wait_for_products has
// returned for its group, the registers of a product may not be touched. The compiler knows that
// only by pin(), which is to be called on them before wgmma_fence() and after the wait; without it,
// it waits after each product (warning C7513).
#pragma once

#include <cstdint>

#include "kernels/primitives/accumulator.cuh"
#include "kernels/primitives/async_copy.cuh"

namespace sbtrain::kernels {

// Orders the calling threads' earlier writes to registers before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
// Waits until at most kPending groups are still incomplete.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

// The rows that a warpgroup holds of a product [64, kCols]: each warp 16 of them.
template <int kColumns>
struct WarpgroupAccumulator : Accumulator<1, kColumns / 8> {
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(this->at[0][c][i])::"memory");
    }
  }
};

// kInner columns of a left operand in registers, rounded to bf16.
template <int kInner>
struct WarpgroupOperand {
  uint32_t at[kInner / 16][4];
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(at[k][i])::"memory");
    }
  }
};

// How the descriptors of a loop's products come about. The compiler keeps them in uniform registers
// from one turn to the next if there are few, and if the address is masked: otherwise it joins the
// shift of the address with what is added to it, and forms each anew, which is better if there are
// too many to keep. That takes four instructions for a product, two of which only repeat the upper
// halves. Where the steps from an operand's first descriptor to its others come from the constant
// bank, each is added to both halves by one (UIADD3.64).
enum class Descriptors : uint8_t { kKept, kFormed, kStepped };
static __constant__ uint64_t descriptor_steps[2][3] = {{0x2, 0x4, 0x6}, {0x80, 0x100, 0x180}};

enum class TileUse : int { kRows = 0, kColumns = 1 };

// A tile of kRows rows of kCols columns as an operand. Where a row has more than 128 bytes, the
// tile is one of 64 columns after the other.
template <int kRows, int kCols, TileUse kUse, Descriptors kDescriptors = Descriptors::kKept>
class TileOperand {
  static constexpr int kRowBytes = kCols >= 64 ? 128 : 64;
  static_assert(kCols == 32 || kCols % 64 == 0);
  static_assert(kDescriptors != Descriptors::kStepped || kCols == 64);

 public:
  static constexpr TileUse use = kUse;
  __device__ __forceinline__ explicit TileOperand(const void* tile)
      : low_(kDescriptors == Descriptors::kKept
                 ? (shared_address(tile) & 0x3ffff) >> 4 | kLeading << 16
                 : (shared_address(tile) >> 4) + (kLeading << 16)) {}
  // The descriptor of the operand's part [.., 16] or [16, ..] that begins at index `inner` of the
  // inner dimension and index `outer` of the other one: a multiple of 16, and one of 64 or, for
  // rows, of 8; of kStepped, 0. Constants cost one addition.
  __device__ __forceinline__ uint64_t at(int inner, int outer = 0) const {
    const int row = kUse == TileUse::kRows ? outer : inner;
    const int col = kUse == TileUse::kRows ? inner : outer;
    constexpr int kPanel = kRowBytes / 2;  // columns
    const int bytes = col / kPanel * (kRows * kRowBytes) + row * kRowBytes + col % kPanel * 2;
    if constexpr (kDescriptors == Descriptors::kStepped) {
      const uint64_t first = static_cast<uint64_t>(kHigh) << 32 | low_;
      return inner == 0 ? first : first + descriptor_steps[static_cast<int>(kUse)][inner / 16 - 1];
    }
    return static_cast<uint64_t>(kHigh) << 32 | (low_ + static_cast<uint32_t>(bytes / 16));
  }

 private:
  // PTX ISA, "Matrix descriptor format". Eight rows are one block of the swizzle. The leading
  // dimension is stepped only between panels of columns that are not the inner dimension. Shared
  // memory ends below 228 KiB, so addresses fit their 14 bits and never carry out of them.
  static constexpr uint32_t kLeading = kUse == TileUse::kRows ? 1 : kRows * kRowBytes / 16;
  static constexpr uint32_t kHigh = 8 * kRowBytes / 16 | (kRowBytes == 128 ? 1u : 2u) << 30;
  uint32_t low_;
};

// One product of 16 steps of the inner dimension; the operands are descriptors, or a's registers.
// kTransposed says that an operand is used by columns. Issued, not complete.

template <int kTransposedA, int kTransposedB>
__device__ __forceinline__ void wgmma_m64k16(WarpgroupAccumulator<32>& c, uint64_t a, uint64_t b,
                                             bool add) {
  auto& d = c.at[0];
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, %19, %20;}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposedA), "n"(kTransposedB));
}
template <int kTransposedB>
__device__ __forceinline__ void wgmma_m64k16(WarpgroupAccumulator<32>& c, const uint32_t (&a)[4],
                                             uint64_t b) {
  auto& d = c.at[0];
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, %21;}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposedB));
}
template <int kTransposedA, int kTransposedB>
__device__ __forceinline__ void wgmma_m64k16(WarpgroupAccumulator<64>& c, uint64_t a, uint64_t b,
                                             bool add) {
  auto& d = c.at[0];
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, %35, %36;}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposedA), "n"(kTransposedB));
}
template <int kTransposedB>
__device__ __forceinline__ void wgmma_m64k16(WarpgroupAccumulator<64>& c, const uint32_t (&a)[4],
                                             uint64_t b) {
  auto& d = c.at[0];
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, %37;}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposedB));
}
template <int kTransposedA, int kTransposedB>
__device__ __forceinline__ void wgmma_m64k16(WarpgroupAccumulator<128>& c, uint64_t a, uint64_t b,
                                             bool add) {
  auto& d = c.at[0];
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, %67, %68;}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
        "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),
        "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),
        "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]),
        "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]),
        "+f"(d[15][2]), "+f"(d[15][3])
      : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposedA), "n"(kTransposedB));
}
template <int kTransposedB>
__device__ __forceinline__ void wgmma_m64k16(WarpgroupAccumulator<128>& c, const uint32_t (&a)[4],
                                             uint64_t b) {
  auto& d = c.at[0];
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
      "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
      "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
      "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, %69;}\n"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
        "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
        "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]),
        "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
        "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]), "+f"(d[7][0]), "+f"(d[7][1]),
        "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
        "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
        "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]),
        "+f"(d[11][3]), "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),
        "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]), "+f"(d[14][0]),
        "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]),
        "+f"(d[15][2]), "+f"(d[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransposedB));
}

// c = a b over kInner steps of the inner dimension, both operands in shared memory; the parts begin
// at `a_outer` and `b_outer`. With `add`, c += a b.
template <int kInner, int kCols, typename A, typename B>
__device__ __forceinline__ void issue_product(WarpgroupAccumulator<kCols>& c, const A& a,
                                              const B& b, bool add = false, int a_outer = 0,
                                              int b_outer = 0) {
#pragma unroll
  for (int k = 0; k < kInner; k += 16) {
    wgmma_m64k16<static_cast<int>(A::use), static_cast<int>(B::use)>(
        c, a.at(k, a_outer), b.at(k, b_outer), add || k > 0);
  }
}
// c += a b, with a in registers.
template <int kInner, int kCols, typename B>
__device__ __forceinline__ void issue_product(WarpgroupAccumulator<kCols>& c,
                                              const WarpgroupOperand<kInner>& a, const B& b) {
#pragma unroll
  for (int k = 0; k < kInner; k += 16) {
    wgmma_m64k16<static_cast<int>(B::use)>(c, a.at[k / 16], b.at(k));
  }
}

}  // namespace sbtrain::kernels
