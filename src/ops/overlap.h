// Kernels that begin before the one in front of them has ended.
#pragma once

#include "core/device.h"
#include "core/stream.h"

namespace sbtrain::ops {

namespace cuda {
void set_overlap(Stream& s, bool on);
}  // namespace cuda

// On a GPU, from now on kernels that are recorded (core/replay.h) may begin before the one in front
// of them has ended (kernels/primitives/dependent_launch.cuh), which changes no result. Off at
// first.
inline void set_overlap(Stream& s, bool on) {
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) cuda::set_overlap(s, on);
  }
}

}  // namespace sbtrain::ops
