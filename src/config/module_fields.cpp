#include "config/module_fields.h"

#include <algorithm>

#include "core/error.h"

namespace sbtrain {
namespace {

// A key of one module, or of several that describe it alike.
struct Option {
  std::string_view key;
  Member member;
  Rule rule;
  std::string_view help;
  std::vector<std::string_view> types;  // the modules
  bool selected = false;                // one of them is the one that the configuration selects
};

// Collects the keys of one module.
class OptionList : public Fields {
 public:
  using Fields::list;
  using Fields::section;
  void value(std::string_view key, const Member& member, const Rule& rule,
             std::string_view help) override {
    options_.push_back({key, member, rule, help, {}, false});
  }
  void section(std::string_view key, const Describe&, std::string_view) override { refuse(key); }
  void list(std::string_view key, ListMember&, const Rule&, std::string_view) override {
    refuse(key);
  }
  const std::vector<Option>& options() const { return options_; }

 private:
  [[noreturn]] static void refuse(std::string_view key) {
    fail(ExitCode::kInternal, "options of modules are single values, '{}' is not", key);
  }
  std::vector<Option> options_;
};

bool alike(const Option& a, const Option& b) {
  return a.key == b.key && a.rule == b.rule && a.help == b.help &&
         a.member.index() == b.member.index();
}

// The keys of every module; a key that several describe alike is listed once. `unused` holds the
// options of the modules that are not selected.
std::vector<Option> all_options(const std::vector<DescribedModule>& modules,
                                std::string_view selected, ModuleOptions& options,
                                std::vector<ModuleOptions>& unused) {
  unused.resize(modules.size());
  std::vector<Option> all;
  for (size_t i = 0; i < modules.size(); ++i) {
    const bool is_selected = modules[i].name == selected;
    OptionList list;
    modules[i].describe(list, is_selected ? options : unused[i]);
    for (const Option& option : list.options()) {
      auto known = std::ranges::find_if(all, [&](const Option& o) { return alike(o, option); });
      if (known == all.end()) known = all.insert(all.end(), option);
      if (is_selected) known->member = option.member;
      known->selected = known->selected || is_selected;
      known->types.push_back(modules[i].name);
    }
  }
  return all;
}

// Each key once. If the selected module has the key, its description is used.
std::vector<Option> one_of_each_key(const std::vector<Option>& all) {
  std::vector<Option> result;
  for (const Option& option : all) {
    const auto known = std::ranges::find(result, option.key, &Option::key);
    if (known == result.end()) {
      result.push_back(option);
      continue;
    }
    std::vector<std::string_view> types = known->types;
    types.insert(types.end(), option.types.begin(), option.types.end());
    if (option.selected) *known = option;
    known->types = std::move(types);
  }
  return result;
}

}  // namespace

void describe_modules(Fields& f, std::string_view selector,
                      const std::vector<DescribedModule>& modules, std::string_view selected,
                      ModuleOptions& chosen) {
  std::vector<ModuleOptions> unused;
  std::vector<Option> options = all_options(modules, selected, chosen, unused);
  if (!f.lists_alternatives()) options = one_of_each_key(options);
  for (Option& option : options) {
    if (option.types.size() < modules.size()) {
      option.rule.conditions.insert(option.rule.conditions.begin(), {selector, option.types});
    }
    f.value(option.key, option.member, option.rule, option.help);
  }
}

}  // namespace sbtrain
