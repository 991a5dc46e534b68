// Jobs of many processes, as the command line starts and ends them.
#pragma once

#include <functional>

#include "config/config.h"
#include "core/backend.h"
#include "core/error.h"
#include "parallel/launch.h"

namespace sbtrain {

// The number of ranks that this process, which no launcher has started, runs on this machine: one
// for each GPU of train.gpus, and one on the CPU. Throws ExitCode::kConfig when there are fewer
// GPUs.
int ranks_to_start(const TrainConfig& train, Backend backend);

// Throws ExitCode::kConfig when train.gpus is not the number of ranks that a launcher has started
// on this machine.
void check_gpus(const TrainConfig& train, const Launch& launch);

// Chooses this rank's GPU. Throws ExitCode::kUsage when there are more ranks than GPUs.
void choose_gpu_of(const Launch& launch);

// Does `work` as one rank of a job. Whatever it throws ends the job: all ranks return its exit
// code, and one of them shows the message. When another rank fails, that is this rank's failure as
// well. A rank that is stuck when the job has failed is ended from another thread.
ExitCode run_in_job(Control& control, const std::function<ExitCode()>& work);

}  // namespace sbtrain
