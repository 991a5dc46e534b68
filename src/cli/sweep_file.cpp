#include "cli/sweep_file.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <set>

#include "config/keys.h"
#include "config/tree.h"
#include "config/values.h"
#include "core/error.h"
#include "core/files.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using schema::in_quotes;
using schema::Value;

// Fills a SweepFile from a tree; problems are collected in the sources.
class SweepReader {
 public:
  SweepReader(schema::Sources& sources, fs::path folder)
      : sources_(sources), folder_(std::move(folder)) {}

  SweepFile read(const Value& root) {
    SweepFile sweep;
    for_each_entry(root, "the sweep", [&](const schema::Entry& entry) {
      if (entry.key == "name") {
        sweep.name = text(entry);
      } else if (entry.key == "out") {
        sweep.out = text(entry);
      } else if (entry.key == "variants") {
        for_each_item(entry, [&](const Value& item) { sweep.variants.push_back(variant(item)); });
      } else if (entry.key == "set") {
        sweep.set = changes(entry);
      } else if (entry.key == "grid") {
        sweep.grid = grid(entry);
      } else if (entry.key == "best_over") {
        for_each_item(entry, [&](const Value& item) { sweep.best_over.push_back(scalar(item)); });
      } else {
        unknown(entry, {"name", "out", "variants", "set", "grid", "best_over"});
      }
    });
    check(sweep, root);
    return sweep;
  }

 private:
  void problem(const schema::Place& place, std::string message) {
    sources_.problem(place, std::move(message));
  }

  void unknown(const schema::Entry& entry, const std::vector<std::string>& known) {
    const std::string near = schema::nearest(entry.key, known);
    problem(entry.place, fmt::format("unknown key {} of a sweep{}", in_quotes(entry.key),
                                     near.empty() ? "" : "; did you mean '" + near + "'?"));
  }

  template <class Visit>
  void for_each_entry(const Value& value, const std::string& what, const Visit& visit) {
    if (value.kind != Value::Kind::kMap) {
      problem(value.place, fmt::format("{}: expected keys and values", what));
      return;
    }
    for (const schema::Entry& entry : value.entries) visit(entry);
  }

  template <class Visit>
  void for_each_item(const schema::Entry& entry, const Visit& visit) {
    if (entry.value.kind != Value::Kind::kList || entry.value.items.empty()) {
      problem(entry.place, fmt::format("{}: expected a list with at least one item", entry.key));
      return;
    }
    for (const Value& item : entry.value.items) visit(item);
  }

  std::string scalar(const Value& value) {
    if (value.kind != Value::Kind::kScalar) problem(value.place, "expected a single value");
    return value.text;
  }

  std::string text(const schema::Entry& entry) { return scalar(entry.value); }

  void check_key(const schema::Entry& entry) {
    if (schema::find_key(entry.key) != nullptr && entry.key.find('*') == std::string::npos) return;
    problem(entry.place,
            fmt::format("unknown key {}{}", in_quotes(entry.key), schema::did_you_mean(entry.key)));
  }

  Changes changes(const schema::Entry& section) {
    Changes result;
    for_each_entry(section.value, section.key, [&](const schema::Entry& entry) {
      check_key(entry);
      result.emplace_back(entry.key, text(entry));
    });
    return result;
  }

  decltype(SweepFile::grid) grid(const schema::Entry& section) {
    decltype(SweepFile::grid) result;
    for_each_entry(section.value, section.key, [&](const schema::Entry& entry) {
      check_key(entry);
      std::vector<std::string>& values = result.emplace_back(entry.key, 0).second;
      for_each_item(entry, [&](const Value& item) {
        values.push_back(scalar(item));
        if (std::ranges::count(values, values.back()) > 1) {
          problem(item.place, fmt::format("{} is in the list already", in_quotes(values.back())));
        }
      });
    });
    return result;
  }

  SweepVariant variant(const Value& item) {
    SweepVariant result;
    for_each_entry(item, "variants", [&](const schema::Entry& entry) {
      if (entry.key == "name") {
        result.name = text(entry);
      } else if (entry.key == "config") {
        result.config = (folder_ / text(entry)).lexically_normal();
      } else if (entry.key == "set") {
        result.set = changes(entry);
      } else {
        unknown(entry, {"name", "config", "set"});
      }
    });
    if (result.config.empty()) problem(item.place, "a variant needs a `config`");
    if (result.name.empty()) result.name = fs::path(result.config).stem();
    if (result.name.find('/') != std::string::npos || result.name.starts_with('.')) {
      problem(item.place, fmt::format("{} cannot name a folder", in_quotes(result.name)));
    }
    return result;
  }

  void check(const SweepFile& sweep, const Value& root) {
    if (sweep.name.empty()) problem(root.place, "missing key 'name'");
    if (sweep.variants.empty()) problem(root.place, "missing key 'variants'");
    std::set<std::string> names;
    for (const SweepVariant& variant : sweep.variants) {
      if (names.insert(variant.name).second) continue;
      problem(root.place, fmt::format("two variants are named {}", in_quotes(variant.name)));
    }
    for (const std::string& key : sweep.best_over) {
      const auto has_key = [&](const auto& entry) { return entry.first == key; };
      if (std::ranges::none_of(sweep.grid, has_key)) {
        problem(root.place, fmt::format("best_over: {} is not in the grid", in_quotes(key)));
      }
    }
  }

  schema::Sources& sources_;
  fs::path folder_;
};

std::string last_segment(const std::string& key) {
  return schema::split_path(key).back();
}

// The name of a grid key in folders and columns: its last segment, or the whole key if another key
// ends in the same segment.
std::string short_key(const SweepFile& sweep, const std::string& key) {
  const auto same_end = [&](const auto& entry) {
    return last_segment(entry.first) == last_segment(key);
  };
  return std::ranges::count_if(sweep.grid, same_end) > 1 ? key : last_segment(key);
}

std::string folder_name(const SweepFile& sweep, const SweepRun& run) {
  std::string name;
  for (const auto& [key, value] : run.grid) {
    name += fmt::format("{}{}={}", name.empty() ? "" : ",", short_key(sweep, key), value);
  }
  std::ranges::replace_if(
      name, [](char c) { return c == '/' || c == ' '; }, '_');
  return run.variant + (name.empty() ? "" : "/" + name);
}

}  // namespace

SweepFile read_sweep(const std::string& path) {
  const std::string text = read_input(path, ExitCode::kConfig, "; give the file of a sweep");
  schema::Sources sources;
  const int source = sources.add({path, {}, 0, ""});
  Value root = schema::parse_yaml(text, source, sources);
  sources.throw_problems();
  if (root.place.source < 0) root.place.source = source;  // an empty file
  SweepFile sweep = SweepReader(sources, fs::path(path).parent_path()).read(root);
  sources.throw_problems();
  std::set<std::string> folders;
  for (const SweepRun& run : expand(sweep)) {
    if (folders.insert(run.name).second) continue;
    fail(ExitCode::kConfig,
         "{}: two runs would have the folder {}: in the names of folders / and spaces become _",
         path, in_quotes(run.name));
  }
  return sweep;
}

std::vector<SweepRun> expand(const SweepFile& sweep) {
  std::vector<SweepRun> runs;
  for (const SweepVariant& variant : sweep.variants) {
    std::vector<Changes> combinations(1);
    for (const auto& [key, values] : sweep.grid) {
      std::vector<Changes> longer;
      for (const Changes& combination : combinations) {
        for (const std::string& value : values) {
          longer.push_back(combination);
          longer.back().emplace_back(key, value);
        }
      }
      combinations = std::move(longer);
    }
    for (Changes& combination : combinations) {
      SweepRun& run = runs.emplace_back();
      run.variant = variant.name;
      run.config = variant.config;
      run.set = sweep.set;
      run.set.insert(run.set.end(), variant.set.begin(), variant.set.end());
      run.grid = std::move(combination);
      run.name = folder_name(sweep, run);
    }
  }
  return runs;
}

}  // namespace sbtrain
