#include "optim/optimizer.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"

namespace sbtrain {

#define SBTRAIN_OPTIMIZER(file) void register_##file(OptimizerRegistry& registry);
#include "optim/optimizers.inc"
#undef SBTRAIN_OPTIMIZER

namespace {

// The calls are explicit, since a linker may drop an object of a library that nothing refers to.
OptimizerRegistry& registry() {
  static OptimizerRegistry optimizers = [] {
    OptimizerRegistry all;
#define SBTRAIN_OPTIMIZER(file) register_##file(all);
#include "optim/optimizers.inc"
#undef SBTRAIN_OPTIMIZER
    return all;
  }();
  return optimizers;
}

}  // namespace

void Optimizer::direct(Stream& /*s*/, const UpdateInputs& /*in*/,
                       std::span<const MatrixView> /*parts*/) const {
  fail(ExitCode::kInternal, "an optimizer that takes matrices lacks direct()");
}

void Optimizer::transform(Stream& /*s*/, const TensorSpec& spec, Tensor /*x_NK*/) const {
  fail(ExitCode::kInternal, "an optimizer that takes '{}' as a matrix lacks transform()",
       spec.name);
}

void Optimizer::apply(Stream& /*s*/, const UpdateInputs& /*in*/,
                      std::span<const MatrixView> /*parts*/) const {
  fail(ExitCode::kInternal, "an optimizer that takes matrices lacks apply()");
}

void OptimizerRegistry::add(OptimizerType type) {
  require(!std::ranges::count(names(), type.name), "two optimizers are called '{}'", type.name);
  types_.push_back(std::move(type));
}

std::vector<std::string_view> OptimizerRegistry::names() const {
  std::vector<std::string_view> names;
  for (const OptimizerType& type : types_) names.emplace_back(type.name);
  return names;
}

const OptimizerType& OptimizerRegistry::at(std::string_view name) const {
  const auto found = std::ranges::find(types_, name, &OptimizerType::name);
  if (found != types_.end()) return *found;
  fail(ExitCode::kConfig, "train.optimizer: there is no optimizer '{}'; known are {}", name,
       fmt::join(names(), ", "));
}

const OptimizerRegistry& optimizer_registry() {
  return registry();
}

void register_optimizer(void (*registrar)(OptimizerRegistry&)) {
  registrar(registry());
}

std::shared_ptr<const Optimizer> make_optimizer(const OptimizerConfig& config) {
  return optimizer_registry().at(config.type).make(config.options);
}

}  // namespace sbtrain
