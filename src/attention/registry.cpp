#include "attention/registry.h"

#include "core/error.h"

namespace sbtrain {
namespace {

AttentionRegistry make_registry() {
  AttentionRegistry registry;
  register_coca(registry);
  register_rebased(registry);
  register_short_conv(registry);
  register_softmax(registry);
  register_stickbreaking(registry);
  return registry;
}

}  // namespace

std::vector<std::string> attention_types() {
  std::vector<std::string> types;
  for (const auto& [name, factory] : make_registry()) types.push_back(name);
  return types;
}

std::unique_ptr<Attention> make_attention(const AttentionConfig& config, const ModelConfig& model) {
  const AttentionRegistry registry = make_registry();
  const auto it = registry.find(config.type);
  if (it == registry.end()) {
    fail(ExitCode::kConfig, "model.attention.type: there is no attention '{}'; known are {}",
         config.type, fmt::join(attention_types(), ", "));
  }
  // Other modules take as many values for each head as fit into the width.
  const bool whole =
      config.type == "softmax" || config.type == "stickbreaking" || config.type == "coca";
  if (model.heads <= 0 || (whole && model.width % model.heads != 0)) {
    fail(ExitCode::kConfig, "model.width: {} is not a multiple of model.heads, {}", model.width,
         model.heads);
  }
  return it->second(config, model);
}

}  // namespace sbtrain
