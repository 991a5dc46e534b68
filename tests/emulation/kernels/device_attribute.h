// What the emulated device is able to.
#pragma once

#include "kernels/launch.h"

namespace sbtrain::kernels {

inline size_t most_shared_bytes() {
  return kMaxSharedBytes;
}

}  // namespace sbtrain::kernels
