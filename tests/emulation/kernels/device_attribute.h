// What the emulated device is able to, in numbers those of an H200.
#pragma once

#include "kernels/launch.h"

namespace sbtrain::kernels {

inline int multiprocessors() {
  return 132;
}

inline int64_t half_of_multiprocessors() {
  return 64;
}

inline int64_t resident_cache_bytes() {
  return int64_t{24} << 20;
}

inline size_t most_shared_bytes() {
  return kMaxSharedBytes;
}

}  // namespace sbtrain::kernels
