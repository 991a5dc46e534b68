// Copies from the device to the host that run beside what the host does.
#pragma once

#include "ops/op.h"

namespace sbtrain::ops {

// Starts to copy x, which is contiguous, to `host`. The copy is part of the stream's work: an event
// tells when it is done. On a GPU the host goes on meanwhile if its memory is page-locked
// (core/pinned_memory.h), and waits otherwise.
struct StartCopyToHost {
  static constexpr std::string_view kName = "start_copy_to_host";
  void* host;
  Tensor x;
  void check() const { Check(kName).flat("x", x, x.numel(), x.dtype); }
};

namespace cpu {
void run(Cpu, Stream& s, const StartCopyToHost& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const StartCopyToHost& op);
}  // namespace cuda

}  // namespace sbtrain::ops
