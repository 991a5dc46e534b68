#include "attention/registry.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.h"

namespace sbtrain {

#define SBTRAIN_ATTENTION_MODULE(file) void register_##file(AttentionRegistry& registry);
#include "attention/modules.inc"
#undef SBTRAIN_ATTENTION_MODULE

namespace {

// The calls are explicit, since a linker may drop a module of a library that nothing refers to.
AttentionRegistry& registry() {
  static AttentionRegistry modules = [] {
    AttentionRegistry all;
#define SBTRAIN_ATTENTION_MODULE(file) register_##file(all);
#include "attention/modules.inc"
#undef SBTRAIN_ATTENTION_MODULE
    return all;
  }();
  return modules;
}

}  // namespace

void AttentionRegistry::add(AttentionModule module) {
  require(!std::ranges::count(names(), module.name), "two attention modules are called '{}'",
          module.name);
  if (module.bench.empty()) module.bench.push_back({.name = module.name, .options = {}});
  for (AttentionBenchCase& c : module.bench) c.type = module.name;
  modules_.push_back(std::move(module));
}

std::vector<std::string_view> AttentionRegistry::names() const {
  std::vector<std::string_view> names;
  for (const AttentionModule& module : modules_) names.emplace_back(module.name);
  return names;
}

const AttentionModule& AttentionRegistry::at(std::string_view name) const {
  const auto found = std::ranges::find(modules_, name, &AttentionModule::name);
  if (found != modules_.end()) return *found;
  fail(ExitCode::kConfig, "model.attention.type: there is no attention '{}'; known are {}", name,
       fmt::join(names(), ", "));
}

const AttentionRegistry& attention_registry() {
  return registry();
}

void register_attention(void (*registrar)(AttentionRegistry&)) {
  registrar(registry());
}

std::string key_heads_problem(const AttentionModule& module, const AttentionShape& model) {
  if (model.key_heads() == model.heads) return {};
  if (model.key_heads() > model.heads || model.heads % model.key_heads() != 0) {
    return fmt::format("{} heads of keys and values do not divide {} heads", model.key_heads(),
                       model.heads);
  }
  if (module.grouped_heads) return {};
  return fmt::format("{} has no groups of heads; leave out kv_heads or set it to {}", module.name,
                     model.heads);
}

std::optional<OptionProblem> heads_problem(const AttentionModule& module,
                                           const AttentionShape& model) {
  if (model.heads < 1) return OptionProblem{"heads", "there must be at least one"};
  if (model.head_dim == 0) {
    if (model.width >= model.heads && (!module.whole_heads || model.width % model.heads == 0)) {
      return {};
    }
    return OptionProblem{
        "heads", fmt::format("width {} is not divisible by {} heads", model.width, model.heads)};
  }
  constexpr auto kMost = static_cast<int64_t>(kMaxSize);
  if (model.head_dim > kMost / model.heads) {
    return OptionProblem{"head_dim", fmt::format("{} heads of {} are wider than {}", model.heads,
                                                 model.head_dim, kMost)};
  }
  if (module.own_head_dim || model.query_width() == model.width) return {};
  return OptionProblem{
      "head_dim", fmt::format("{} has heads of width / heads; leave out head_dim", module.name)};
}

std::unique_ptr<Attention> make_attention(const AttentionConfig& config,
                                          const AttentionShape& model) {
  const AttentionModule& module = attention_registry().at(config.type);
  if (const auto found = heads_problem(module, model)) {
    fail(ExitCode::kConfig, "model.{}: {}", found->key, found->message);
  }
  if (const std::string found = key_heads_problem(module, model); !found.empty()) {
    fail(ExitCode::kConfig, "model.kv_heads: {}", found);
  }
  for (const OptionProblem& problem : module.check(config.options, model)) {
    fail(ExitCode::kConfig, "model.attention.{}: {}", problem.key, problem.message);
  }
  return module.make(config.options, model);
}

}  // namespace sbtrain
