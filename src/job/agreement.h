// Ranks of one job must be the same program with the same configuration on the same hardware.
#pragma once

#include <map>
#include <string>

#include "job/control.h"

namespace sbtrain {

// Compares `fields` (names and values) among all ranks, each of which calls it. Throws
// ExitCode::kConfig on all of them, with the fields that differ, the ranks and their values.
void agree(Control& control, const std::map<std::string, std::string>& fields);

}  // namespace sbtrain
