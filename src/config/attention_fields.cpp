// The keys of attention modules: those that all modules have, and each module's own, which come
// from the registry.
#include "attention/registry.h"
#include "config/module_fields.h"

namespace sbtrain {

void describe(Fields& f, AttentionConfig& c) {
  const AttentionRegistry& registry = attention_registry();
  f.add("type", c.type, one_of(registry.names()),
        "What mixes tokens: the name of an attention module.");
  std::vector<DescribedModule> modules;
  std::vector<std::string_view> projecting;
  for (const AttentionModule& module : registry.modules()) {
    modules.push_back({module.name, module.describe});
    if (module.projects_output) projecting.emplace_back(module.name);
  }
  describe_modules(f, "type", modules, c.type, c.options);
  f.add("output_bias", c.output_bias, Rule{}.when("type", projecting),
        "The output projection has a bias.");
}

}  // namespace sbtrain
