// What a plan is made for: the properties of the machine that will run it on which the choice of
// implementations and the sizes of scratch depend.
#pragma once

#include "core/backend.h"

namespace sbtrain {

struct Target {
  // The defaults, for which a dry run without a GPU plans, are an H200 with a current cuDNN.
  Target(Backend backend) : backend(backend) {}  // NOLINT: a backend is a target with defaults
  Backend backend;
  int sm = 90;                // compute capability, 10 * major + minor
  int multiprocessors = 132;  // of the GPU
  // Whether the GPU has the tensor core instructions of warpgroups (wgmma) and the copy engine that
  // goes with them as sm_90a has them. Later architectures have others in their place.
  bool has_wgmma() const { return sm == 90; }
  // The version of cuDNN in the library's own form, 91900 for 9.19.0; 0: there is none. Whether the
  // library can be loaded is known only when it is first used; when it cannot be, the portable
  // kernels run in the scratch that was planned.
  int cudnn = 91900;
};

// The target that describes this machine, for a backend that runs on it. Without a GPU it has the
// defaults.
Target present_target(Backend backend);

}  // namespace sbtrain
