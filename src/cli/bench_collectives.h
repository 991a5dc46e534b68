// sbtrain bench collectives.
#pragma once

#include "cli/cli.h"

namespace sbtrain {

void add_bench_collectives(Command bench, Action& action);

}  // namespace sbtrain
