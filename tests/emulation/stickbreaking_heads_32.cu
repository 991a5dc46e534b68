// stickbreaking.cuh, for heads of 32 channels.
#include "emulation/stickbreaking.cuh"

namespace sbtrain::emulation {

template void StickBreaking::run<32, false>(Timing, float);
template void StickBreaking::run<32, true>(Timing, float);
template void StickBreaking::run<32, false, Folded>(Timing, float);

}  // namespace sbtrain::emulation
