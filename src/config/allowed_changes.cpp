// checkpoint.allow_changes: the names of what a resumed run may change.
#include <algorithm>

#include "config/keys.h"
#include "config/validate.h"
#include "config/values.h"

namespace sbtrain::schema {
namespace {

// What a data state has beside keys (Loader::check_same_data); "*" stands for a source's index.
constexpr std::string_view kDataNames[] = {"tokenizer_hash", "data.sources",
                                           "data.sources.*.content_hash",
                                           "data.sources.*.documents", "data.sources.*.tokens"};

std::string without_indices(const std::string& name) {
  std::string pattern;
  for (const std::string& segment : split_path(name)) {
    pattern += (pattern.empty() ? "" : ".") + (is_index(segment) ? "*" : segment);
  }
  return pattern;
}

// Keys of which a change needs no leave are names too, since a name may be more than is needed.
bool is_name(const std::string& name) {
  if (name.find('*') != std::string::npos) return false;  // only the names themselves are compared
  if (std::ranges::find(kDataNames, without_indices(name)) != std::end(kDataNames)) return true;
  const Key* key = find_key(name);
  return key != nullptr && (key->kind == Key::Kind::kScalar || key->kind == Key::Kind::kTexts);
}

// The name that is most like `name`, with its indices; empty if none is near.
std::string nearest_name(const std::string& name) {
  std::vector<std::string> names(std::begin(kDataNames), std::end(kDataNames));
  for (const Key& key : all_keys()) {
    if (key.kind == Key::Kind::kScalar) names.push_back(short_path(key.path));
  }
  std::string indices = "0";
  for (const std::string& segment : split_path(name)) {
    if (is_index(segment)) indices = segment;
  }
  std::string near = nearest(without_indices(name), names);
  for (size_t star = near.find('*'); star != std::string::npos; star = near.find('*')) {
    near.replace(star, 1, indices);
  }
  return near;
}

std::string advice(const std::string& name) {
  if (name.find('*') == std::string::npos && find_key(name) != nullptr) {
    return "is a section; name its keys one by one";
  }
  const std::string near = nearest_name(name);
  const std::string meant =
      near.empty() ? did_you_mean(name) : fmt::format("; did you mean '{}'?", near);
  return "names nothing that a run could change" +
         (meant.empty() ? "; the message that refuses a change gives its name" : meant);
}

}  // namespace

std::vector<CrossProblem> allowed_change_problems(const Config& config) {
  std::vector<CrossProblem> problems;
  const std::vector<std::string>& names = config.checkpoint.allow_changes;
  for (size_t i = 0; i < names.size(); ++i) {
    if (is_name(names[i])) continue;
    problems.push_back({fmt::format("checkpoint.allow_changes.{}", i),
                        fmt::format("{} {}", in_quotes(names[i]), advice(names[i]))});
  }
  return problems;
}

}  // namespace sbtrain::schema
