// One rank of a job that runs the checks of communicators together with the others. A launcher
// starts several of them, such as mpirun; alone it is a job of one.
//   multi_rank checks cpu|cuda
#include "multi/rank.h"

#include <gtest/gtest.h>

#include "core/gpus.h"
#include "job/launch.h"
#include "parallel/make_communicator.h"
#include "support/communicator_suite.h"

namespace sbtrain::test {
namespace {

Backend backend = Backend::kCpu;
std::unique_ptr<Control> control;
std::unique_ptr<Communicator> ranks;

class Ranks : public testing::TestWithParam<CommunicatorCheck> {};

INSTANTIATE_TEST_SUITE_P(Checks, Ranks, testing::ValuesIn(communicator_checks()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Ranks, Hold) {
  const CommunicatorCheck& check = GetParam();
  if (check.large && backend == Backend::kCpu) GTEST_SKIP() << "takes 7 GB";
  if (check.misuse && backend == Backend::kCuda) GTEST_SKIP() << "NCCL does not compare calls";
  control->progress(std::string(check.name), std::chrono::minutes(2));
  Memory memory(backend);
  Stream stream(memory, "communication", StreamPriority::kHigh);
  check.run(*ranks, stream);
}

// The job's failure or, if it has none, this rank's own.
int fail_with(const JobFailure& own) {
  if (control) control->report(own);
  const JobFailure failure = control && control->failure() ? *control->failure() : own;
  fmt::print(stderr, "{}\n", failure.message);
  return static_cast<int>(failure.code);
}

int run() {
  const Launch launch = find_launch(process_environment());
  control = make_control(
      launch, {.rendezvous = std::chrono::seconds(60), .progress = std::chrono::seconds(30)});
  control->check();
  // Ranks may share a GPU.
  if (backend == Backend::kCuda) choose_gpu(launch.local_rank % visible_gpus());
  ranks = make_communicator(*control, backend);
  const int result = RUN_ALL_TESTS();
  ranks.reset();
  control->finish();
  return result;
}

}  // namespace

int run_checks(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc > 0 && argv[0] == std::string("cuda")) backend = Backend::kCuda;
  try {
    return run();
  } catch (const Error& e) {
    return fail_with({e.code(), e.what()});
  }
}

}  // namespace sbtrain::test
