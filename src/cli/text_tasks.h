// The options that choose tasks in plain text, for every subcommand that makes their samples.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/options.h"
#include "eval/text_task.h"

namespace sbtrain {

inline constexpr const char* kTextTaskGroup = "Tasks in plain text";

struct TextTaskSelection {
  std::vector<std::string> tasks;  // names of TextTaskKind
  int64_t samples = 100;           // of each length
  std::vector<double> depths;      // as in TextTaskOptions
  std::string haystack;            // file with the text for needle_local_*
  std::string word_list;           // file with the words for cwe
  uint64_t seed = 42;

  // Returns the option --tasks, which the others need. `help`: of --tasks.
  Option add(Command command, const std::string& help);
  // Throws ExitCode::kUsage for options that do not go together.
  void check(const std::vector<int64_t>& lengths) const;
};

// The tasks in the order of their names. Reads the files of the selection; throws ExitCode::kData.
std::vector<std::unique_ptr<TextTask>> make_text_tasks(const TextTaskSelection& selection,
                                                       const TextTask::Encode& encode);

}  // namespace sbtrain
