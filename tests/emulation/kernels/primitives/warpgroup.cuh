// Replaces setmaxnreg (emulation/emulator.h), which has no meaning here.
#pragma once

namespace sbtrain::kernels {

template <int kRegisters>
void setmaxnreg_decrease() {}
template <int kRegisters>
void setmaxnreg_increase() {}
inline unsigned reread_thread() {
  return threadIdx.x;
}

}  // namespace sbtrain::kernels
