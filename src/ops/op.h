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
// ops/cpu/ and ops/cuda/.
//
// Tensors are views with the shapes their suffixes say (legend in core/tensor.h). On the CPU all
// reals are f32. On CUDA activations, their gradients and compute weights are bf16; weight
// gradients, statistics and what the optimizer keeps are f32. `dx +=` means that the op adds to
// what the tensor holds, `dx =` that it overwrites it.
#pragma once

#include <string_view>

#include "core/device.h"
#include "core/error.h"
#include "core/op_profile.h"
#include "core/stream.h"
#include "core/tensor.h"
#include "ops/check.h"
#include "ops/cuda/timer.h"

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

// Ops that are a launch of their kernel.
template <typename Op, typename... Scratch>
requires requires(const Op& op) {
  op.kernel();
}
void run(Cuda, Stream& s, const Op& op, const Scratch&... scratch) {
  auto parameters = op.kernel();
  ((parameters.scratch = scratch.tensor()), ...);
  if constexpr (requires { parameters.early; }) parameters.early = begins_early(s);
  launch(cuda_stream(s), parameters);
}
}  // namespace cuda

inline bool on_cuda(const Stream& s) {
  return s.target().backend == Backend::kCuda;
}

template <typename Op>
concept TakesScratch = requires(const Op& op, const Stream& s) {
  op.scratch(s);
};
template <typename Op>
concept HasLimits = requires(const Op& op, const Target& target) {
  op.check_limits(target);
};
template <typename Op, typename Tag>
concept RunsOn = requires(const Op& op, Stream& s) {
  run(Tag(), s, op);
}
|| requires(const Op& op, Stream& s) {
  run(Tag(), s, op, op.scratch(s));
};

// Runs the op on the backend `Tag`, with the scratch that take_scratch() returned.
template <typename Tag, typename Op, typename Scratch>
void run_with(Stream& s, const Op& op, const Scratch& scratch) {
  if constexpr (!RunsOn<Op, Tag>) {
    fail(ExitCode::kInternal, "{}: {} has no such op", Op::kName, backend_name(s.backend()));
  } else if constexpr (TakesScratch<Op>) {
    run(Tag(), s, op, scratch);
  } else {
    run(Tag(), s, op);
  }
}

struct NoScratch {};
template <typename Op>
auto take_scratch(const Stream& s, const Op& op) {
  if constexpr (TakesScratch<Op>) {
    return op.scratch(s);
  } else {
    return NoScratch{};
  }
}

// Throws if the op cannot run on the stream's backend. A configuration is planned before anything
// else happens, so a user learns at once what the backend lacks.
template <typename Op>
void check_op(const Stream& s, const Op& op) {
  op.check();
  if (!on_cuda(s)) {
    if (RunsOn<Op, cpu::Cpu>) return;
    fail(ExitCode::kConfig, "{}: not on the CPU yet; set device: cuda", Op::kName);
  }
  if (!RunsOn<Op, cuda::Cuda>) {
    fail(ExitCode::kConfig, "{}: not on CUDA yet; set device: cpu", Op::kName);
  }
  if (!kHasCuda && !s.planning()) {
    fail(ExitCode::kInternal, "{}: this build has no {} backend", Op::kName,
         backend_name(s.backend()));
  }
  if constexpr (HasLimits<Op>) op.check_limits(s.target());
}

template <typename Op>
void run(Stream& s, const Op& op) {
  check_op(s, op);
  [[maybe_unused]] const auto scratch = take_scratch(s, op);
  if (s.planning()) return;
  if (s.backend() == Backend::kCpu) {
    const OpTimer timer(s.profile(), Op::kName);
    return run_with<cpu::Cpu>(s, op, scratch);
  }
  if constexpr (kHasCuda) {
    const cuda::DeviceTimer timer(s, Op::kName);
    run_with<cuda::Cuda>(s, op, scratch);
  }
}

}  // namespace sbtrain::ops
