#include "job/control_message.h"

#include <gtest/gtest.h>

#include "core/error.h"
#include "job/tcp_control.h"

namespace sbtrain {
namespace {

TEST(ControlMessage, EveryTruncationIsRefused) {
  const std::string frame = control::encode(
      control::Texts{.topic = "a topic", .members = {0, 3, 700}, .texts = {"x", "", "zz"}});
  const std::string body = frame.substr(4);
  EXPECT_EQ(std::get<control::Texts>(control::decode(body)).members[2], 700u);
  for (size_t size = 0; size < body.size(); ++size) {
    EXPECT_THROW(control::decode(body.substr(0, size)), Error) << size;
  }
  EXPECT_THROW(control::decode(body + "x"), Error);
  EXPECT_THROW(control::decode("\x7f"), Error);
}

TEST(ControlMessage, DescribesRanks) {
  EXPECT_EQ(control::describe_ranks({0, 1, 3, 4, 5, 9}), "0, 1, 3-5, 9");
}

}  // namespace
}  // namespace sbtrain
