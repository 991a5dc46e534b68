// What one rank of a job does in tests, by the first word of its command line. The others are the
// arguments; the result is the exit code.
#pragma once

namespace sbtrain::test {

int run_checks(int argc, char** argv);  // rank.cpp
int run_fault(int argc, char** argv);   // faulty_rank.cpp
int run_update(int argc, char** argv);  // update_rank.cpp

}  // namespace sbtrain::test
