// What an op is, and the one way in which every op runs.
//
// An op is a struct: its tensors and parameters are its members, and its formula and source stand
// in the comment above it. It also has
//   kName                        what errors and profiles call it;
//   check()                      throws ExitCode::kInternal where shapes or types do not fit: the
//                                model is built from a validated configuration, so that is a bug;
//   check_limits(target)         optional: throws ExitCode::kConfig, naming the setting to change,
//                                where the target's kernels are too small for a valid model;
//   scratch(stream)              optional: takes what the op needs while it runs. The sizes are
//                                stated only here and depend on the stream's target and on shapes.
//   kernel()                     optional: what its kernel (kernels/) takes, in the same order,
//                                where a launch of it is all that CUDA does for the op.
// A backend has an op if it overloads run(Cpu, ...) or run(Cuda, ...) for it, for CUDA also if the
// op has kernel(). The declarations stand at the end of the op's header, the definitions in
// ops/cpu/ and ops/cuda/. run(stream, op) is compiled once, in ops/run.cpp, whose list has every
// op; an op that is defined elsewhere includes ops/run.h instead.
//
// Tensors are views with the shapes their suffixes say (legend in core/tensor.h). On the CPU all
// reals are f32. On CUDA activations, their gradients and compute weights are bf16; weight
// gradients, statistics and what the optimizer keeps are f32. `dx +=` means that the op adds to
// what the tensor holds, `dx =` that it overwrites it.
#pragma once

#include <string_view>

#include "core/stream.h"
#include "core/tensor.h"
#include "ops/check.h"

namespace sbtrain::ops {

namespace cpu {
struct Cpu {};
}  // namespace cpu
namespace cuda {
struct Cuda {};
cudaStream_t cuda_stream(const Stream& s);
// Whether the kernel that is launched next may begin early
// (kernels/primitives/dependent_launch.cuh): only while the stream is recorded. Otherwise the host
// launches kernels too slowly for that to help.
bool begins_early(const Stream& s);
}  // namespace cuda

inline bool on_cuda(const Stream& s) {
  return s.target().backend == Backend::kCuda;
}

// Checks the op, takes its scratch and calls the stream's backend. A plan stops after the scratch,
// so that plan and run cannot differ.
template <typename Op>
void run(Stream& s, const Op& op);

}  // namespace sbtrain::ops
