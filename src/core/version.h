// What was built.
#pragma once

namespace sbtrain {

const char* version();       // "0.2.0"
const char* git_revision();  // of the source tree at the build, ends in "-dirty" if changed;
                             // or what the CMake variable SBTRAIN_REVISION said

// Of the CUDA backend: "13.0, machine code for sm_90a, PTX for compute_80"; empty in a build for
// CPUs.
const char* cuda_build();
bool native_build();  // compiled for the processor of the machine that built it

}  // namespace sbtrain
