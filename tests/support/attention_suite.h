// The tests of attention_suite.cpp, which a program gets by linking tests_attention_suite.
#pragma once

#include <string>
#include <vector>

namespace sbtrain::test {

// The registered modules that the suite tests in this program. Each program says it for itself:
// what another one tests is not computed again.
std::vector<std::string> modules_under_test();

}  // namespace sbtrain::test
