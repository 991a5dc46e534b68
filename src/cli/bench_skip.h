// sbtrain bench skip: what skipping keys saves with trained weights.
#pragma once

#include "cli/cli.h"

namespace sbtrain {

void add_bench_skip(Command bench, Action& action);

}  // namespace sbtrain
