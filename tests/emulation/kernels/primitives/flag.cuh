// Replaces flags in device memory (emulation/emulator.h).
#pragma once

#include "emulation/emulator.h"

namespace sbtrain::kernels {

inline void wait_for_value(const int* flag, int value) {
  emulation::wait_until("a flag in device memory", value, [flag, value] { return *flag == value; });
}
inline void store_release(int* flag, int value) {
  *flag = value;
}

}  // namespace sbtrain::kernels
