#include "cli/ranks.h"

#include <unistd.h>

#include <chrono>
#include <optional>
#include <thread>

#include "cli/backend.h"
#include "cli/failure.h"
#include "core/gpus.h"
#include "core/log.h"
#include "job/secret.h"
#include "job/supervisor.h"
#include "train/batch_share.h"

namespace sbtrain {
namespace {

// After the job has failed, the time for a rank to end by itself: aborting a communicator takes a
// tenth of a second, freeing memory some seconds. Copy engines that wait for a rank that is gone
// are freed by nothing but the end of their process.
constexpr std::chrono::seconds kLastResort{10};

// Enough for ranks that a launcher starts together; a rank that waits longer for the others, to
// tell them of its own failure, only delays its message.
constexpr std::chrono::seconds kFailureRendezvous{30};

std::optional<int> wanted_gpus(const TrainConfig& train) {
  if (train.gpus == "auto") return std::nullopt;
  return std::stoi(train.gpus);  // a number: the configuration has been checked
}

// The last line of this rank's log; the terminal shows the message once for the whole job.
void note_end(const JobFailure& failure, const char* how = "") {
  log_to_added_sinks(LogLevel::kError,
                     fmt::format("this rank ends with exit code {}{}: {}",
                                 static_cast<int>(failure.code), how, failure.message));
}

void end_if_stuck(const JobFailure& failure, bool shows) {
  std::thread([failure, shows] {
    std::this_thread::sleep_for(kLastResort);
    note_end(failure, " (it was stuck, and did not end by itself)");
    if (shows) show_failure({failure.code, failure.message});
    ::_exit(static_cast<int>(failure.code));
  }).detach();
}

ExitCode show_own(const std::exception_ptr& problem) {
  try {
    std::rethrow_exception(problem);
  } catch (...) {
    return static_cast<ExitCode>(show_failure(current_failure()));
  }
}

}  // namespace

ExitCode run_on_ranks(const RankCommand& command) {
  Launch launch = find_launch(process_environment());
  if (launch.world == 1) {
    command.prepare(launch);
    const int ranks = launch.launcher.empty() ? command.ranks() : 1;
    if (ranks > 1) return supervise({.arguments = process_arguments(), .ranks = ranks});
    return command.work(Job{.launch = launch});
  }
  // All ranks would say the same, also of commands that keep no log of each rank.
  if (launch.rank > 0) limit_log_sinks(LogLevel::kError);
  std::exception_ptr problem;
  Deadlines deadlines{.rendezvous = kFailureRendezvous};  // of a rank that cannot even prepare
  std::filesystem::path shared;
  try {
    deadlines = command.prepare(launch);
    shared = command.shared_folder();
    if (!launch.problem.empty()) throw Error(ExitCode::kUsage, launch.problem);
  } catch (...) {
    problem = std::current_exception();
  }
  control::choose_secret_file(launch, shared);
  const Job job{.launch = launch, .control = make_control(launch, deadlines)};
  // Where the ranks have not met, what this one knows says more than who is missing.
  if (problem && job.control->failure() && job.control->shows_failure()) return show_own(problem);
  return run_as_rank(*job.control, [&] {
    if (problem) std::rethrow_exception(problem);
    return command.work(job);
  });
}

int fail_before_job(const std::exception_ptr& problem) {
  const auto rethrow = [&]() -> ExitCode { std::rethrow_exception(problem); };
  const auto show = [&] { return static_cast<int>(show_own(problem)); };
  Launch launch;
  try {
    launch = find_launch(process_environment());
  } catch (const Error&) {
    return show();  // the variables are wrong as well; the command line comes first
  }
  if (launch.world == 1) return show();
  control::choose_secret_file(launch, "");
  const auto control = make_control(launch, {.rendezvous = kFailureRendezvous});
  // Where the ranks have not met, what this one knows says more than who is missing.
  if (control->failure() && control->shows_failure()) return show();
  return static_cast<int>(run_as_rank(*control, rethrow));
}

bool prints_for_job() {
  try {
    return find_launch(process_environment()).rank == 0;
  } catch (const Error&) {
    return true;  // a text is worth more than a complaint about variables
  }
}

int ranks_to_start(const TrainConfig& train, Backend backend) {
  const std::optional<int> wanted = wanted_gpus(train);
  const int visible = backend == Backend::kCuda ? visible_gpus() : 0;
  if (!wanted) {
    const int ranks = most_ranks(train, std::max(visible, 1));
    if (ranks < visible) {
      log_warning(
          "training on {} of {} GPUs: more cannot share train.batch, {} sequences, in "
          "micro-batches "
          "of {}; a smaller train.micro_batch or a larger train.batch makes use of them",
          ranks, visible, train.batch, train.micro_batch);
    }
    return ranks;
  }
  if (*wanted == 1 || *wanted <= visible) {
    check_batch(train, *wanted);
    return *wanted;
  }
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

int ranks_for_gpus(int gpus, Backend backend) {
  const int visible = backend == Backend::kCuda ? visible_gpus() : 1;
  if (gpus > visible) {
    fail(ExitCode::kUsage, "--gpus {}: {}", gpus,
         backend == Backend::kCuda
             ? fmt::format("this machine has {}", visible)
             : "this command uses the CPU, for which a launcher starts the ranks (mpirun -n)");
  }
  return gpus > 0 ? gpus : visible;
}

Backend select_rank_backend(DeviceChoice device, const Launch& launch) {
  const Backend backend = select_backend(device);
  const bool one_of_many = launch.world > 1;
  if (backend == Backend::kCuda && one_of_many) choose_gpu(choose_device(launch, visible_gpus()));
  return backend;
}

ExitCode run_as_rank(Control& control, const std::function<ExitCode()>& work) {
  const Control::FailureHandle last_resort = control.on_failure(
      [&](const JobFailure& failure) { end_if_stuck(failure, control.shows_failure()); });
  try {
    control.check();
    const ExitCode code = work();
    control.finish();
    return code;
  } catch (...) {
    const Failure failure = current_failure();
    control.report({.code = failure.code, .message = failure.message});
    // What this rank has met, where another one's failure is the job's.
    if (!control.failure()->message.ends_with(failure.message)) {
      log_to_added_sinks(LogLevel::kError, "this rank has failed: " + failure.message);
    }
  }
  const JobFailure failure = control.failure().value();
  note_end(failure);
  if (!control.shows_failure()) return failure.code;
  if (failure.code == ExitCode::kPreempted) {  // of a job that has not begun, which is no error
    log_info("{}", failure.message);
    return failure.code;
  }
  return static_cast<ExitCode>(show_failure({failure.code, failure.message}));
}

}  // namespace sbtrain
