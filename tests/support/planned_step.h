// The memory of a training step, planned as a run plans it.
#pragma once

#include <string>

#include "core/memory.h"
#include "train/step.h"

namespace sbtrain::test {

// Plans a step on the machine that `memory` is of, with this implementation of its ops where one is
// named, and gives `memory` the plan.
inline void adopt_step_plan(Memory& memory, const Config& config, const Transformer& model,
                            const Mesh& mesh, const std::string& implementation = {}) {
  Memory plan = Memory::planning(memory.backend());
  Stream planning(plan);
  planning.set_implementation(implementation);
  TrainStep(config, model, planning, mesh).plan();
  memory.adopt_plan(plan);
}

}  // namespace sbtrain::test
