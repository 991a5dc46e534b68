// The communicator of a job: the one place that knows which library serves which ranks.
#pragma once

#include <memory>

#include "core/backend.h"
#include "parallel/communicator.h"
#include "parallel/control.h"

namespace sbtrain {

// All ranks of the job: a single process's for a job of one, NCCL's for ranks on GPUs, whose
// process has set its CUDA device, MPI's for ranks on the CPU. Collective. Throws ExitCode::kUsage,
// saying what to install, when this build cannot connect ranks of this kind.
std::unique_ptr<Communicator> make_communicator(Control& control, Backend backend);

}  // namespace sbtrain
