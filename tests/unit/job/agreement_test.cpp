#include "job/agreement.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "job/control_socket.h"
#include "job/launch.h"

namespace sbtrain {
namespace {

using Fields = std::map<std::string, std::string>;

// What agree() says on each rank; empty: nothing.
std::vector<std::string> messages(const std::vector<Fields>& fields) {
  const auto world = static_cast<int>(fields.size());
  FileDescriptor listener = control::listen_on("127.0.0.1", 0);
  Launch launch{.launcher = "test", .world = world, .local_world = world, .token = "agreement"};
  launch.port = control::port_of(listener.get());
  std::vector<std::string> result(fields.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    launch.rank = launch.local_rank = rank;
    launch.listener = rank == 0 ? listener.release() : -1;
    threads.emplace_back([&, launch] {
      const auto control = make_control(launch);
      try {
        agree(*control, fields[launch.rank]);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::kConfig);
        result[launch.rank] = error.what();
      }
      control->finish();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

TEST(Agreement, SaysNothingOfEqualRanks) {
  const Fields fields = {{"train.lr", "1e-3"}, {"(GPU)", "NVIDIA H200"}};
  for (const std::string& message : messages({fields, fields, fields})) EXPECT_EQ(message, "");
}

TEST(Agreement, NamesFieldsRanksAndValues) {
  const Fields usual = {{"train.lr", "1e-3"}, {"(version)", "1"}, {"seed", "7"}};
  const Fields other = {{"train.lr", "2e-3"}, {"(version)", "1"}, {"seed", "7"}};
  const Fields third = {{"train.lr", "1e-3"}, {"(version)", "2"}};
  for (const std::string& message : messages({usual, usual, other, usual, third})) {
    EXPECT_NE(message.find("train.lr: '1e-3' on ranks 0, 1, 3, 4; '2e-3' on rank 2"),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("(version): '1' on ranks 0-3; '2' on rank 4"), std::string::npos)
        << message;
    EXPECT_NE(message.find("seed: '7' on ranks 0-3; nothing on rank 4"), std::string::npos)
        << message;
  }
}

TEST(Agreement, ManyDifferencesAreCounted) {
  Fields a;
  Fields b;
  for (int i = 0; i < 20; ++i) {
    a[fmt::format("key{:02}", i)] = "1";
    b[fmt::format("key{:02}", i)] = "2";
  }
  const std::string message = messages({a, b})[1];
  EXPECT_NE(message.find("key04"), std::string::npos) << message;
  EXPECT_EQ(message.find("key05"), std::string::npos) << message;
  EXPECT_NE(message.find("15 more"), std::string::npos) << message;
}

}  // namespace
}  // namespace sbtrain
