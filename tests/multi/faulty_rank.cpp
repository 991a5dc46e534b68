// One rank of a job in which rank 1 fails in the tenth round of collectives, in a way that the
// command line names:  multi_rank fault cpu|cuda kill|stop|leave|throw|hang|exchange|stuck
// exchange: it is killed while exchanges are under way, on GPUs by the copy engines.
// stuck: it is killed while the others wait for something that no abort of a communicator ends.
// Every rank writes "rank R ends with C: MESSAGE" and exits with the code C.
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <thread>

#include "cli/ranks.h"
#include "core/error.h"
#include "core/gpus.h"
#include "job/launch.h"
#include "multi/rank.h"
#include "ops/memory.h"
#include "ops/stream_control.h"
#include "parallel/make_communicator.h"

namespace sbtrain::test {
namespace {

void fail_as(const std::string& fault) {
  if (fault == "stuck") std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (fault == "kill" || fault == "stuck") raise(SIGKILL);
  if (fault == "stop") raise(SIGSTOP);
  if (fault == "leave") _exit(0);
  if (fault == "throw") fail(ExitCode::kData, "shard 3 is damaged");
  if (fault == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
}

void collectives(Control& control, Communicator& ranks, Backend backend, const std::string& fault) {
  Memory memory(backend);
  Stream s(memory);
  ops::control(s).check_after_waits([&] { control.check(); });
  const Buffer x = s.allocate(MemoryClass::kGradients, "x", DType::kF32, {100000});
  for (int round = 0; round < 1000; ++round) {
    control.progress(fmt::format("round {}", round));
    if (round == 10 && ranks.rank() == 1) fail_as(fault);
    if (round == 10 && fault == "stuck") std::this_thread::sleep_for(std::chrono::hours(1));
    ops::run(s, ops::Fill{.x = x, .value = 1.0f});
    ranks.all_reduce(s, x);
    float first = 0;
    ops::run(s, ops::CopyToHost{.host = &first, .x = x.tensor().row_range(0, 1)});
    require(first == static_cast<float>(ranks.world()), "{} is a wrong sum", first);
  }
  fail(ExitCode::kInternal, "no fault has ended the job");
}

// Each round gives the stream exchanges for milliseconds before it waits for them.
void exchanges(Control& control, Communicator& ranks, Backend backend) {
  constexpr int kExchanges = 20;
  const int64_t n = int64_t{1} << (backend == Backend::kCuda ? 24 : 14);
  const int64_t all = n * ranks.world();
  const auto held = collective_memory(backend, static_cast<size_t>(2 * all) * sizeof(float));
  require(held != nullptr, "no memory for exchanges");
  const Tensor both(held.get(), DType::kF32, {2, all});
  const Tensor from = both.row_range(0, 1).reshaped({all});
  const Tensor to = both.row_range(1, 1).reshaped({all});
  Memory memory(backend);
  Stream s(memory);
  ops::control(s).check_after_waits([&] { control.check(); });
  ops::run(s, ops::Fill{.x = both, .value = 1.0f});
  const std::shared_ptr<void> registered = ranks.register_memory(both);
  for (int round = 0;; ++round) {
    control.progress(fmt::format("round {}", round));
    if (round == 10 && ranks.rank() == 1) {
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        ::kill(::getpid(), SIGKILL);
      }).detach();
    }
    for (int i = 0; i < kExchanges; ++i) ranks.all_to_all(s, to, from);
    ops::run(s, ops::Synchronize{});
  }
}

ExitCode run(Control& control, Backend backend, int local_rank, const std::string& fault) {
  // Ranks may share a GPU.
  if (backend == Backend::kCuda) choose_gpu(local_rank % visible_gpus());
  const bool exchanging = fault == "exchange";
  // The deadline is for the rounds: on a busy machine ranks may take longer to connect.
  control.progress("connecting", std::chrono::seconds(60));
  const std::unique_ptr<Communicator> ranks =
      make_communicator(control, backend, {.copy_engines = exchanging});
  exchanging ? exchanges(control, *ranks, backend) : collectives(control, *ranks, backend, fault);
  return ExitCode::kInternal;  // not reached: both end with an error
}

}  // namespace

int run_fault(int argc, char** argv) {
  if (argc != 2) return 2;
  const Launch launch = find_launch(process_environment());
  const auto control = make_control(launch, {.rendezvous = std::chrono::seconds(60),
                                             .progress = std::chrono::seconds(3),
                                             .heartbeat = std::chrono::milliseconds(200)});
  const Backend backend = argv[0] == std::string("cuda") ? Backend::kCuda : Backend::kCpu;
  // As the program does it, so that a rank that is stuck ends as well.
  const ExitCode code =
      run_as_rank(*control, [&] { return run(*control, backend, launch.local_rank, argv[1]); });
  fmt::print(stderr, "rank {} ends with {}: {}\n", launch.rank, static_cast<int>(code),
             control->failure() ? control->failure()->message : "the job has no failure");
  return static_cast<int>(code);
}

}  // namespace sbtrain::test
