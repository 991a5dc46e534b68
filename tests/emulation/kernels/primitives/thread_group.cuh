// Replaces named barriers (emulation/emulator.h).
#pragma once

namespace sbtrain::kernels {

inline int warp_of(int thread) {
  return thread / 32;
}

template <int kSize>
void sync_threads(int id) {
  emulation::barrier(id, kSize);
}

template <int kSize>
struct NamedThreads {
  static constexpr int kThreads = kSize;
  int id, first;
  int thread() const { return static_cast<int>(threadIdx.x) - first; }
  int warp() const { return warp_of(thread()); }
  void sync() const { sync_threads<kSize>(id); }
  bool all(bool x) const { return emulation::barrier(id, kSize, x); }
};

template <int kSize>
struct BlockThreads : NamedThreads<kSize> {
  BlockThreads() : NamedThreads<kSize>{0, 0} {}
};

}  // namespace sbtrain::kernels
