// The definition of run(stream, op), for ops/run.cpp and for ops that are defined outside of this
// library.
#pragma once

#include <tuple>

#include "core/build_options.h"
#include "core/error.h"
#include "core/stream.h"
#include "ops/op.h"
#include "ops/stream_control.h"

namespace sbtrain::ops {

namespace cuda {
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

template <typename Op, typename Tag>
concept RunsOn = requires(const Op& op, Stream& s) {
  run(Tag(), s, op);
}
|| requires(const Op& op, Stream& s) {
  run(Tag(), s, op, op.scratch(s));
};

// The op's scratch, or nothing if it takes none.
template <typename Op>
auto take_scratch(const Stream& s, const Op& op) {
  if constexpr (requires { op.scratch(s); }) {
    return std::tuple(op.scratch(s));
  } else {
    return std::tuple();
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
  if (!SBTRAIN_HAS_CUDA && !s.planning()) {
    fail(ExitCode::kInternal, "{}: this build has no {} backend", Op::kName,
         backend_name(s.backend()));
  }
  if constexpr (requires { op.check_limits(s.target()); }) op.check_limits(s.target());
}

// Runs the op on the backend `Tag`, which has it, as check_op() has found.
template <typename Tag, typename Op, typename Scratch>
void run_on(Stream& s, const Op& op, const Scratch& scratch) {
  if constexpr (RunsOn<Op, Tag>) {
    std::apply([&](const auto&... taken) { run(Tag(), s, op, taken...); }, scratch);
  }
}

template <typename Op>
void run(Stream& s, const Op& op) {
  check_op(s, op);
  const auto scratch = take_scratch(s, op);
  if (s.planning()) return;
  const WorkTimer timer(s, Op::kName);
  if (s.backend() == Backend::kCpu) return run_on<cpu::Cpu>(s, op, scratch);
#if SBTRAIN_HAS_CUDA
  run_on<cuda::Cuda>(s, op, scratch);
#endif
}

}  // namespace sbtrain::ops
