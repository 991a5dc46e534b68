// Replaces setmaxnreg (emulation/emulator.h), which has no meaning here.
#pragma once

namespace sbtrain::kernels {

template <int kRegisters>
void lower_registers() {}
template <int kRegisters>
void raise_registers() {}
inline unsigned reread_thread() {
  return threadIdx.x;
}

}  // namespace sbtrain::kernels
