// The fixture of tests that need a GPU. It is apart from support/gpu.h so that tests of kernels,
// which know no tensors, can use it too.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "core/device.h"

namespace sbtrain::test {

// Skips every test of the fixture if there is no GPU.
class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (!cuda_available(&why)) GTEST_SKIP() << "no GPU: " << why;
  }
};

}  // namespace sbtrain::test
