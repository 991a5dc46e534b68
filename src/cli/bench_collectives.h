// sbtrain bench collectives.
#pragma once

#include "cli/cli.h"

namespace sbtrain {

void add_bench_collectives(CLI::App& bench, Action& action);

}  // namespace sbtrain
