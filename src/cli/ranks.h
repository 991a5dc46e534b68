// Commands that run on several ranks: how the command line starts and ends them.
#pragma once

#include <exception>
#include <filesystem>
#include <functional>

#include "core/backend.h"
#include "core/error.h"
#include "job/launch.h"
#include "train/run_config.h"

namespace sbtrain {

// What a command does that may run on many ranks.
struct RankCommand {
  // Reads what the command needs before the ranks meet, such as the configuration, and returns how
  // long they wait for each other. What it throws ends the job after they have met, so that it is
  // shown once.
  std::function<Deadlines(const Launch&)> prepare = [](const Launch&) { return Deadlines{}; };
  // A folder that all ranks see, where rank 0 may leave them a secret; empty: none is known. Asked
  // after prepare().
  std::function<std::filesystem::path()> shared_folder = [] { return std::filesystem::path(); };
  // The number of ranks that this process starts on its machine, if no launcher has started it.
  // Asked after prepare().
  std::function<int()> ranks = [] { return 1; };
  // The part of one rank.
  std::function<ExitCode(const Job&)> work;
};

// Runs a command as the rank of a launcher that this process is, as the supervisor of the ranks
// that it starts with its own arguments, or in this process alone.
ExitCode run_on_ranks(const RankCommand& command);

// Ends this process for what it found before it could join its job, such as a wrong option. Ranks
// of a launcher join the others for that, so that nobody waits for them and a message that all have
// is shown once. Returns the exit code.
int fail_before_job(const std::exception_ptr& problem);

// Whether this process is the one of its job that prints what its user asked for, such as --help:
// rank 0, or no rank of a launcher.
bool prints_for_job();

// The number of ranks that this process, which no launcher has started, runs on this machine: one
// for each GPU of train.gpus, and one on the CPU. `auto` takes as many GPUs as can share the batch,
// and says so where others are left. Throws ExitCode::kConfig when there are fewer GPUs than
// train.gpus, or when they cannot share it.
int ranks_to_start(const TrainConfig& train, Backend backend);

// Throws ExitCode::kConfig when train.gpus is not the number of ranks that a launcher has started
// on this machine.
void check_gpus(const TrainConfig& train, const Launch& launch);

// The number of ranks for `--gpus N`: N if that many GPUs are visible, all of them for 0, and 1 on
// the CPU. Throws ExitCode::kUsage when there are fewer.
int ranks_for_gpus(int gpus, Backend backend);

// What `device` means for this rank, which on a GPU gets its own. Throws ExitCode::kUsage when
// there are more ranks than GPUs.
Backend select_rank_backend(DeviceChoice device, const Launch& launch);

// Does `work` as one rank of a job. Whatever it throws ends the job: all ranks return its exit
// code, and one of them shows the message. When another rank fails, that is this rank's failure as
// well. A rank that is stuck when the job has failed is ended from another thread.
ExitCode run_as_rank(Control& control, const std::function<ExitCode()>& work);

}  // namespace sbtrain
