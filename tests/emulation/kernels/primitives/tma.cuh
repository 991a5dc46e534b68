// Replaces the copy engine (emulation/emulator.h). tests/emulation/tensor_map.cu makes the maps.
#pragma once

#include <array>
#include <cstring>

#include "kernels/primitives/mbarrier.cuh"
#include "kernels/primitives/tensor_map.h"
#include "kernels/primitives/tile.cuh"

namespace sbtrain::kernels {

inline void prefetch_tensor_map(const CUtensorMap&) {}
inline void fence_async_proxy() {}
inline void fence_all_proxies() {}

// Additions are made at once.
inline void bulk_store(void* global, const void* shared, int bytes) {
  std::memcpy(global, shared, static_cast<size_t>(bytes));
}
inline void bulk_add(float* global, const float* shared, int bytes) {
  emulation::check(shared_address(shared) % 16 == 0 && bytes % 16 == 0, "a copy not in vectors");
  for (int i = 0; i < bytes / 4; ++i) global[i] += shared[i];
}
inline void bulk_commit() {}
template <int kGroups>
void bulk_wait_read() {}
template <int kGroups>
void bulk_wait() {}

// Copies one row of a box; elements outside of the tensor become zero.
template <int kRank>
void copy_row(__nv_bfloat16* tile, const TensorBox<kRank>& x, std::array<int, kRank> at, int row) {
  bool inside = true;
  int64_t offset = at[0];
  for (size_t n = 1; n < kRank; ++n) {
    inside = inside && at[n] >= 0 && at[n] < x.shape[n];
    offset += at[n] * x.strides[n - 1];
  }
  for (int col = 0; col < x.box[0]; col += 8) {
    const int place =
        x.box[0] == 32 ? tile_offset<32>(row, col / 8) : tile_offset<64>(row, col / 8);
    if (inside) {
      std::memcpy(tile + place, x.data + offset + col, 16);
    } else {
      std::memset(tile + place, 0, 16);
    }
  }
}

template <int kRank>
void load_box(void* shared, const CUtensorMap& map, Mbarrier& barrier,
              const std::array<int, kRank>& begin) {
  const auto x = emulation::bits_as<TensorBox<kRank>>(map);
  emulation::check(shared_address(shared) % 1024 == 0, "a tile that is not aligned to 1024 bytes");
  emulation::check(begin[0] >= 0 && begin[0] + x.box[0] <= x.shape[0], "columns beyond the tensor");
  emulation::issue_copy([=, &barrier] {
    int rows = 1;
    for (size_t n = 1; n < kRank; ++n) rows *= x.box[n];
    for (int row = 0; row < rows; ++row) {
      std::array<int, kRank> at = begin;
      int rest = row;
      for (size_t n = 1; n < kRank; rest /= x.box[n++]) at[n] += rest % x.box[n];
      copy_row<kRank>(static_cast<__nv_bfloat16*>(shared), x, at, row);
    }
    barrier.copied(2 * rows * x.box[0]);
  });
}

inline void bulk_load(void* shared, const void* global, int bytes, Mbarrier& barrier) {
  emulation::check(shared_address(shared) % 16 == 0 && bytes % 16 == 0, "a copy not in vectors");
  emulation::check(reinterpret_cast<uintptr_t>(global) % 16 == 0, "a source that is not aligned");
  emulation::issue_copy([=, &barrier] {
    std::memcpy(shared, global, static_cast<size_t>(bytes));
    barrier.copied(bytes);
  });
}

inline void tma_load(void* shared, const CUtensorMap& map, Mbarrier& barrier, int x0, int x1,
                     int x2) {
  load_box<3>(shared, map, barrier, {x0, x1, x2});
}
inline void tma_load(void* shared, const CUtensorMap& map, Mbarrier& barrier, int x0, int x1,
                     int x2, int x3, int x4) {
  load_box<5>(shared, map, barrier, {x0, x1, x2, x3, x4});
}

}  // namespace sbtrain::kernels
