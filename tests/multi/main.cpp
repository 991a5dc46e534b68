// multi_rank: one rank of a job. It is one program, since each would hold all kernels.
#include <string_view>

#include "multi/rank.h"

int main(int argc, char** argv) {
  using namespace sbtrain::test;  // NOLINT: only here
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (what == "checks") return run_checks(argc - 2, argv + 2);
  if (what == "fault") return run_fault(argc - 2, argv + 2);
  if (what == "update") return run_update(argc - 2, argv + 2);
  return 2;
}
