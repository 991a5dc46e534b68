// What multi_rank update prints.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace sbtrain::test {

// The hexadecimal digest in the output of all ranks.
inline std::string digest_in(const std::string& output) {
  static const std::string kBefore = "tensors ";
  const size_t begin = output.find(kBefore);
  EXPECT_NE(begin, std::string::npos) << output;
  return begin == std::string::npos ? "" : output.substr(begin + kBefore.size(), 64);
}

}  // namespace sbtrain::test
