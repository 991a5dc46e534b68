// Replaces a special register (emulation/emulator.h).
#pragma once

namespace sbtrain::kernels {

inline unsigned read_block_y() {
  return blockIdx.y;
}

}  // namespace sbtrain::kernels
