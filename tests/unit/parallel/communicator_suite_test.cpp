// The communicators that need no other process: the single one, and worlds of threads.
#include "support/communicator_suite.h"

#include <gtest/gtest.h>

#include "support/tensors.h"
#include "support/thread_world.h"

namespace sbtrain::test {
namespace {

class CommunicatorSuite : public testing::TestWithParam<CommunicatorCheck> {};

INSTANTIATE_TEST_SUITE_P(Checks, CommunicatorSuite, testing::ValuesIn(communicator_checks()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(CommunicatorSuite, HoldsForASingleProcess) {
  if (GetParam().large) GTEST_SKIP() << "takes 7 GB";
  CpuStream s;
  const auto ranks = make_single_process();
  GetParam().run(*ranks, s);
}

TEST_P(CommunicatorSuite, HoldsForThreads) {
  if (GetParam().large) GTEST_SKIP() << "takes 7 GB";
  for (const int world : {1, 2, 4, 7}) {
    SCOPED_TRACE(world);
    run_ranks(world, [](Communicator& ranks) {
      CpuStream s;
      GetParam().run(ranks, s);
    });
  }
}

}  // namespace
}  // namespace sbtrain::test
