#include "cli/job.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>

#include "cli/failure.h"
#include "core/gpus.h"

namespace sbtrain {
namespace {

// After the job has failed, the time for a rank to end by itself: aborting a communicator takes a
// tenth of a second, freeing memory some seconds.
constexpr std::chrono::seconds kLastResort{30};

std::optional<int> wanted_gpus(const TrainConfig& train) {
  if (train.gpus == "auto") return std::nullopt;
  return std::stoi(train.gpus);  // a number: the configuration has been checked
}

void end_if_stuck(const JobFailure& failure, bool shows) {
  std::thread([failure, shows] {
    std::this_thread::sleep_for(kLastResort);
    if (shows) show_failure({failure.code, failure.message});
    ::_exit(static_cast<int>(failure.code));
  }).detach();
}

}  // namespace

int ranks_to_start(const TrainConfig& train, Backend backend) {
  const std::optional<int> wanted = wanted_gpus(train);
  const int visible = backend == Backend::kCuda ? visible_gpus() : 0;
  if (!wanted) return std::max(visible, 1);
  if (*wanted == 1 || *wanted <= visible) return *wanted;
  if (backend != Backend::kCuda) {
    fail(ExitCode::kConfig,
         "train.gpus: {}, but this run uses the CPU, for which a launcher starts the ranks "
         "(mpirun -n {} sbtrain ...); set train.gpus to auto",
         *wanted, *wanted);
  }
  fail(ExitCode::kConfig, "train.gpus: {}, but {} GPU{} visible on this machine", *wanted, visible,
       visible == 1 ? " is" : "s are");
}

void check_gpus(const TrainConfig& train, const Launch& launch) {
  const std::optional<int> wanted = wanted_gpus(train);
  if (!wanted || *wanted == launch.local_world) return;
  fail(ExitCode::kConfig,
       "train.gpus: {}, but {} has started {} rank{} on this machine; set train.gpus to auto, or "
       "start as many ranks",
       *wanted, launch.launcher, launch.local_world, launch.local_world == 1 ? "" : "s");
}

void choose_gpu_of(const Launch& launch) {
  choose_gpu(choose_device(launch, visible_gpus()));
}

ExitCode run_in_job(Control& control, const std::function<ExitCode()>& work) {
  const Control::FailureHandle last_resort = control.on_failure(
      [&](const JobFailure& failure) { end_if_stuck(failure, control.shows_failure()); });
  try {
    control.check();
    const ExitCode code = work();
    control.finish();
    return code;
  } catch (...) {
    const Failure failure = current_failure();
    spdlog::debug("this rank ends: {}", failure.message);
    control.report({.code = failure.code, .message = failure.message});
  }
  const Failure failure = [&]() -> Failure {
    const JobFailure job = control.failure().value();
    return {job.code, job.message};
  }();
  if (control.shows_failure()) return static_cast<ExitCode>(show_failure(failure));
  return failure.code;
}

}  // namespace sbtrain
