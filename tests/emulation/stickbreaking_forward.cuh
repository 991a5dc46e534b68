// The forward pass of stick-breaking attention on Hopper, emulated (emulator.h), which the tests of
// both backward passes begin with.
#pragma once

#include "emulation/attention.cuh"
#include "kernels/attention/mainloop_stickbreaking_forward_hopper.cuh"

namespace sbtrain::emulation {

template <typename Shape>
void run_forward(Timing timing, const kernels::StickBreakingProblem& p) {
  const kernels::HopperForwardArguments x{.p = p,
                                          .scheduler = {},
                                          .q = token_tiles(p, p.q, Shape::kQueries),
                                          .k = key_tiles(p, p.k, Shape::kKeys),
                                          .v = key_tiles(p, p.v, Shape::kKeys)};
  run_persistent<kernels::StickForwardMainloop<Shape>>(timing, x);
}

}  // namespace sbtrain::emulation
