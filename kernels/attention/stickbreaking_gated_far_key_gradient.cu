#include "kernels/attention/launch_stickbreaking_backward.cuh"

namespace sbtrain::kernels {

template void launch_stick_key_gradient<128, true, true>(cudaStream_t, const StickBreakingProblem&,
                                                         int, int);
template void launch_stick_key_gradient<256, true, true>(cudaStream_t, const StickBreakingProblem&,
                                                         int, int);

}  // namespace sbtrain::kernels
