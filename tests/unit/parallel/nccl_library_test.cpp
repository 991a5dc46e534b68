// NCCL before 2.28 is refused where it is loaded, by its version: the library that SBTRAIN_OLD_NCCL
// names says that it is 2.27.5, and has the name by which the program loads NCCL.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include "parallel/nccl.h"

namespace sbtrain {
namespace {

TEST(NcclLibrary, OldOnesAreRefusedByTheirVersion) {
  ASSERT_NE(dlopen(SBTRAIN_OLD_NCCL, RTLD_NOW | RTLD_LOCAL), nullptr) << dlerror();
  const FoundLibrary found = find_nccl();
  EXPECT_EQ(found.version, "");
  EXPECT_NE(found.problem.find("NCCL 2.27.5 ("), std::string::npos) << found.problem;
  EXPECT_NE(found.problem.find("install NCCL 2.28 or later"), std::string::npos) << found.problem;
}

}  // namespace
}  // namespace sbtrain
