// How attention modules make themselves known. A module is one file: its options with their help
// and rules, its class, and a function register_<file> that adds it to the registry under the name
// that configurations use. The rest of the program learns everything about a module from here.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/exported.h"
#include "core/fields.h"

namespace sbtrain {

// Why options do not fit each other or the model.
struct OptionProblem {
  std::string key;  // in its section: "position"
  std::string message;
};

// A module with some of its options, for `sbtrain bench attention`.
struct AttentionBenchCase {
  std::string name;
  std::map<std::string, std::string> options;
  std::string type{};  // the module's name; add() fills it in
};

struct AttentionModule {
  std::string name;             // the value of model.attention.type
  bool whole_heads = true;      // heads divide the width; else they take what fits, rounded down
  bool projects_output = true;  // else its output goes to the residual stream as it is
  bool grouped_heads = false;   // takes fewer heads of keys and values than of queries
  bool own_head_dim = false;    // takes heads of another size than width / heads
  std::function<void(Fields&, ModuleOptions&)> describe;
  std::function<std::vector<OptionProblem>(const ModuleOptions&, const AttentionShape&)> check;
  std::function<std::unique_ptr<Attention>(const ModuleOptions&, const AttentionShape&)> make;
  // Why ranks cannot share sequences with these options (attention/context.h); empty if they can.
  std::function<std::string(const ModuleOptions&)> context_problem;
  // The rotary positions that the options ask for; null if they ask for none.
  std::function<RotaryOptions*(ModuleOptions&)> rotary;
  // What the options are in models of other programs; nothing where those have no such attention.
  std::function<std::optional<TransformersAttention>(const ModuleOptions&)> transformers;
  std::function<std::optional<FlaAttention>(const ModuleOptions&)> fla;
  std::vector<AttentionBenchCase> bench;  // empty: the module with its defaults
};

// The same for a module whose options are an `Options`: a struct with defaults, ==, and beside it
// a function describe(Fields&, Options&).
template <class Options>
struct AttentionModuleOf {
  std::string name;
  bool whole_heads = true;
  bool projects_output = true;
  bool grouped_heads = false;
  bool own_head_dim = false;
  std::unique_ptr<Attention> (*make)(const Options&, const AttentionShape&) = nullptr;
  std::vector<OptionProblem> (*check)(const Options&, const AttentionShape&) = nullptr;
  std::string (*context_problem)(const Options&) = nullptr;  // null: they cannot yet
  RotaryOptions* (*rotary)(Options&) = nullptr;
  std::optional<TransformersAttention> (*transformers)(const Options&) = nullptr;
  std::optional<FlaAttention> (*fla)(const Options&) = nullptr;
  std::vector<AttentionBenchCase> bench{};
};

class AttentionRegistry {
 public:
  template <class Options>
  void add(AttentionModuleOf<Options> module) {
    add(AttentionModule{
        .name = std::move(module.name),
        .whole_heads = module.whole_heads,
        .projects_output = module.projects_output,
        .grouped_heads = module.grouped_heads,
        .own_head_dim = module.own_head_dim,
        .describe = [](Fields& f, ModuleOptions& options) { describe(f, options.as<Options>()); },
        .check =
            [check = module.check](const ModuleOptions& options, const AttentionShape& model) {
              return check ? check(options.as<Options>(), model) : std::vector<OptionProblem>{};
            },
        .make = [make = module.make](
                    const ModuleOptions& options,
                    const AttentionShape& model) { return make(options.as<Options>(), model); },
        .context_problem =
            [problem = module.context_problem](const ModuleOptions& options) {
              return problem ? problem(options.as<Options>())
                             : std::string("ranks cannot share its sequences yet");
            },
        .rotary = [rotary = module.rotary](ModuleOptions& options) -> RotaryOptions* {
          return rotary ? rotary(options.as<Options>()) : nullptr;
        },
        .transformers = exported(module.transformers),
        .fla = exported(module.fla),
        .bench = std::move(module.bench)});
  }
  // Throws ExitCode::kInternal when the name is taken.
  void add(AttentionModule module);

  // In the order of registration.
  const std::deque<AttentionModule>& modules() const { return modules_; }
  std::vector<std::string_view> names() const;
  // Throws ExitCode::kConfig for an unknown name, listing the known ones.
  const AttentionModule& at(std::string_view name) const;

 private:
  template <class Exported, class Options>
  static std::function<std::optional<Exported>(const ModuleOptions&)> exported(
      std::optional<Exported> (*of)(const Options&)) {
    return [of](const ModuleOptions& options) {
      return of ? of(options.as<Options>()) : std::optional<Exported>{};
    };
  }

  std::deque<AttentionModule> modules_;  // a deque: names() refers to its elements
};

// Every module of the program.
const AttentionRegistry& attention_registry();

// Adds modules from outside this library. To be called before any configuration is read.
void register_attention(void (*registrar)(AttentionRegistry&));

// Why the module cannot have the model's heads and head_dim, with the key in the model's section.
std::optional<OptionProblem> heads_problem(const AttentionModule& module,
                                           const AttentionShape& model);
// Why the module cannot have the model's kv_heads; empty if it can.
std::string key_heads_problem(const AttentionModule& module, const AttentionShape& model);

// What most modules use for `make`.
template <class Module, class Options>
std::unique_ptr<Attention> make_module(const Options& options, const AttentionShape& model) {
  return std::make_unique<Module>(options, model);
}

// The options of a module that has none.
struct NoOptions {
  bool operator==(const NoOptions&) const = default;
};
inline void describe(Fields& /*f*/, NoOptions& /*o*/) {}

}  // namespace sbtrain
