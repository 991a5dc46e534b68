// Dispatch of ops that only the CPU backend has.
#pragma once

#include "ops/check.h"

namespace sbtrain::ops {

template <typename Cpu, typename Plan>
void dispatch_cpu(const Stream& s, std::string_view op, Cpu&& cpu, Plan&& plan) {
  const auto refuse = [&] {
    fail(ExitCode::kConfig, "{} runs on the CPU alone so far: set device to cpu", op);
  };
  dispatch(s, op, std::forward<Cpu>(cpu), refuse, std::forward<Plan>(plan));
}

template <typename Cpu>
void dispatch_cpu(const Stream& s, std::string_view op, Cpu&& cpu) {
  dispatch_cpu(s, op, std::forward<Cpu>(cpu), [] {});
}

}  // namespace sbtrain::ops
