// The keys of optimizers, which come from the registry.
#include "config/module_fields.h"
#include "optim/optimizer.h"

namespace sbtrain {

void describe(Fields& f, OptimizerConfig& c) {
  const OptimizerRegistry& registry = optimizer_registry();
  f.add("optimizer", c.type, one_of(registry.names()),
        "What changes the weights (docs/optimizers.md): the name of an optimizer.");
  std::vector<DescribedModule> optimizers;
  for (const OptimizerType& type : registry.types()) {
    optimizers.push_back({type.name, type.describe});
  }
  describe_modules(f, "optimizer", optimizers, c.type, c.options);
}

}  // namespace sbtrain
