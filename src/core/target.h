// What a plan is made for: the machine that shall run it, as far as the choice of implementations
// and the sizes of scratch depend on it.
#pragma once

#include "core/backend.h"

namespace sbtrain {

struct Target {
  // The defaults are those of an H200 with a current cuDNN: what a dry run without a GPU plans for.
  Target(Backend backend) : backend(backend) {}  // NOLINT: a backend is a target with defaults
  Backend backend;
  int sm = 90;                // compute capability, 10 * major + minor
  int multiprocessors = 132;  // of the GPU
  // The version of cuDNN as the library counts, 91900 for 9.19.0; 0: there is none. Whether the
  // library can be loaded is known only when it is first asked for; where it cannot be, the
  // portable kernels run in the scratch that was planned.
  int cudnn = 91900;
};

// The target that this machine is, for a backend that runs here. Where there is no GPU the defaults
// stand.
Target present_target(Backend backend);

}  // namespace sbtrain
