// The communicator of a job: the one place that knows which library serves which ranks.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "core/backend.h"
#include "core/memory.h"
#include "core/shared_library.h"
#include "job/control.h"
#include "parallel/communicator.h"

namespace sbtrain {

// What NCCL lets a job choose; MPI ignores all of it.
struct CommunicatorOptions {
  // Thread blocks, and so multiprocessors, that a collective takes from the matrix products beside
  // it; 0: NCCL chooses.
  int min_ctas = 0;
  int max_ctas = 0;
  // Gathers between registered memory by the copy engines, which take no multiprocessors. The
  // memory must come from collective_memory().
  bool copy_engines = false;
  // Until all ranks have connected.
  std::chrono::seconds connect_timeout{300};
};

// All ranks of the job: a single process's for a job of one, NCCL's for ranks on GPUs, whose
// process has set its CUDA device, MPI's for ranks on the CPU. Collective. Throws ExitCode::kUsage,
// saying what to install, when this build cannot connect ranks of this kind.
std::unique_ptr<Communicator> make_communicator(Control& control, Backend backend,
                                                const CommunicatorOptions& options = {});

// The library that make_communicator would use for several ranks of that kind, or why there is
// none.
FoundLibrary rank_library(Backend backend);

// Lets a training run's memory come from collective_memory() where these options need that. To be
// called before anything is allocated.
void prepare_memory(Memory& memory, const CommunicatorOptions& options, int world);

// Whether the environment lets NCCL reach the memory of other GPUs directly, which the copy engines
// need: not with NCCL_P2P_DISABLE=1, NCCL_CUMEM_ENABLE=0 or NCCL_WIN_ENABLE=0.
bool nccl_may_reach_other_gpus();

// Memory of the current device that other ranks can reach directly, where that differs from other
// memory. Null if there is none.
std::shared_ptr<void> collective_memory(Backend backend, size_t bytes);

}  // namespace sbtrain
