#include "cli/text_tasks.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "cli/options.h"
#include "core/error.h"
#include "core/files.h"

namespace sbtrain {
namespace {

// A prompt of more tokens than this is refused: it is held in memory as text and as tokens.
constexpr int64_t kLongestPrompt = int64_t{1} << 24;
constexpr size_t kLargestHaystack = size_t{256} << 20;  // bytes
constexpr size_t kFewestWords = 40;                     // as many as the solved example of cwe has

std::vector<std::string> task_names() {
  std::vector<std::string> names;
  for (const auto& entry : kNames<TextTaskKind>) names.emplace_back(entry.name);
  return names;
}

// The name of a task. CLI::IsMember would put all names into one word of the help and man page.
Check task_name() {
  const auto check = [](const std::string& name) {
    const std::vector<std::string> names = task_names();
    if (std::ranges::find(names, name) != names.end()) return std::string();
    return fmt::format("no task '{}'; there are {}", name, fmt::join(names, ", "));
  };
  return {check, "TASK"};
}

TextTaskKind kind_of(const std::string& name) {
  const auto* const entry =
      std::ranges::find(kNames<TextTaskKind>, name, &EnumName<TextTaskKind>::name);
  require(entry != std::end(kNames<TextTaskKind>), "no task '{}'", name);
  return entry->value;
}

std::shared_ptr<const LocalText> read_haystack(const std::string& path) {
  if (path.empty()) return nullptr;
  return std::make_shared<LocalText>(read_input(path, ExitCode::kData, "", kLargestHaystack));
}

std::vector<std::string> read_words(const std::string& path) {
  if (path.empty()) return {};
  std::istringstream text(read_input(path, ExitCode::kData));
  std::set<std::string> words;
  for (std::string word; text >> word;) words.insert(word);
  if (words.size() < kFewestWords) {
    fail(ExitCode::kData, "{}: {} different words, cwe takes {} or more", path, words.size(),
         kFewestWords);
  }
  return {words.begin(), words.end()};
}

}  // namespace

Option TextTaskSelection::add(Command command, const std::string& help) {
  Option names =
      command
          .add_option("--tasks", tasks, fmt::format("{}: {}", help, fmt::join(task_names(), ", ")))
          .delimiter(',')
          .check(task_name())
          .group(kTextTaskGroup);
  command.add_option("--samples", samples, "Prompts of each task and length")
      .check(whole_numbers(int64_t{1}, int64_t{1} << 16))
      .capture_default_str()
      .needs(names)
      .group(kTextTaskGroup);
  command
      .add_option("--depths", depths,
                  "Where a single needle is hidden, such as 0,0.5,1: 0 is the beginning of the "
                  "filler, 1 its end. The samples take turns; without it each draws its depth")
      .delimiter(',')
      .check(in_range(0.0, 1.0))
      .needs(names)
      .group(kTextTaskGroup);
  command.add_option("--haystack", haystack, "Text in which needle_local_* hides its needles")
      .needs(names)
      .group(kTextTaskGroup);
  command
      .add_option("--word-list", word_list,
                  "Words for cwe, separated by white space; default: 1149 built-in ones")
      .needs(names)
      .group(kTextTaskGroup);
  command.add_option("--seed", seed, "Same seed, same samples")
      .capture_default_str()
      .needs(names)
      .group(kTextTaskGroup);
  return names;
}

void TextTaskSelection::check(const std::vector<int64_t>& lengths) const {
  if (tasks.empty()) return;
  const int64_t longest = *std::ranges::max_element(lengths);
  if (longest > kLongestPrompt) {
    fail(ExitCode::kUsage, "--lengths: {} tokens, --tasks takes up to {}", longest, kLongestPrompt);
  }
  const auto local = std::ranges::find_if(
      tasks, [](const std::string& name) { return needs_text(kind_of(name)); });
  if (local != tasks.end() && haystack.empty()) {
    fail(ExitCode::kUsage, "{} needs a text to hide its needles in: give it with --haystack",
         *local);
  }
  if (local == tasks.end() && !haystack.empty()) {
    fail(ExitCode::kUsage, "--haystack: none of --tasks is a needle_local_*");
  }
  if (!word_list.empty() && std::ranges::find(tasks, "cwe") == tasks.end()) {
    fail(ExitCode::kUsage, "--word-list: cwe is not one of --tasks");
  }
}

std::vector<std::unique_ptr<TextTask>> make_text_tasks(const TextTaskSelection& selection,
                                                       const TextTask::Encode& encode) {
  const std::shared_ptr<const LocalText> text = read_haystack(selection.haystack);
  const std::vector<std::string> words = read_words(selection.word_list);
  std::vector<std::unique_ptr<TextTask>> tasks;
  for (const std::string& name : selection.tasks) {
    tasks.push_back(std::make_unique<TextTask>(TextTaskOptions{.kind = kind_of(name),
                                                               .seed = selection.seed,
                                                               .depths = selection.depths,
                                                               .text = text,
                                                               .words = words},
                                               encode));
  }
  const auto with_depth = [](const auto& task) { return task->has_depth(); };
  if (!selection.depths.empty() && std::ranges::none_of(tasks, with_depth)) {
    fail(ExitCode::kUsage, "--depths: none of --tasks hides its answer in one place");
  }
  return tasks;
}

}  // namespace sbtrain
