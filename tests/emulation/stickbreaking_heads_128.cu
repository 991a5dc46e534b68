// stickbreaking.cuh, for heads of 128 channels.
#include "emulation/stickbreaking.cuh"

namespace sbtrain::emulation {

template void StickBreaking::run<128, false>(Timing, float);
template void StickBreaking::run<128, false, Folded>(Timing, float);

}  // namespace sbtrain::emulation
