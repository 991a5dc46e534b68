#include "support/program.h"

#include <fmt/ranges.h>

#include <charconv>
#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <utility>

namespace sbtrain::test {

std::string program() {
  const char* other = std::getenv("TEST_PROGRAM");
  return other == nullptr ? SBTRAIN_PROGRAM : other;
}

void must_run(std::vector<std::string> arguments, const std::filesystem::path& log,
              const std::map<std::string, std::string>& environment) {
  arguments.insert(arguments.begin(), program());
  Process process(arguments, log, environment);
  const int code = process.wait();
  if (code == 0) return;
  throw std::runtime_error(
      fmt::format("{} ended with exit code {} (TEST_PROGRAM names another program): {}",
                  fmt::join(arguments, " "), code, process.output()));
}

void make_training_files(const std::filesystem::path& folder,
                         const std::map<std::string, std::string>& texts) {
  const std::string tokenizer = folder / "tokenizer.model";
  const auto run = [&](const std::vector<std::string>& arguments) {
    must_run(arguments, folder / "log", {{"OMP_WAIT_POLICY", "passive"}});
  };
  run({"tokenizer", "train", "--input", SBTRAIN_TEST_TEXT, "--vocab", "400", "--output",
       tokenizer});
  for (const auto& [name, lines] : texts) {
    const std::string text = folder / (name + ".jsonl");
    write_file(text, lines);
    run({"prepare", "--input", text, "--tokenizer", tokenizer, "--output",
         folder / (name + ".h5")});
  }
}

int64_t last_recorded_step(const std::filesystem::path& run) {
  static constexpr std::string_view kBegin = "{\"step\":";
  const std::string text = read_file(run / "metrics.jsonl");
  const std::string_view lines = std::string_view(text).substr(0, text.rfind('\n') + 1);
  if (lines.empty()) return -1;
  const size_t before = lines.substr(0, lines.size() - 1).rfind('\n');
  const std::string_view last = lines.substr(before + 1);  // npos + 1 is 0
  if (!last.starts_with(kBegin))
    throw std::runtime_error("a record without a step: " + std::string(last));
  int64_t step = 0;
  std::from_chars(last.data() + kBegin.size(), last.data() + last.size(), step);
  return step;
}

ProgramTest::Arguments ProgramTest::command(Arguments arguments) {
  arguments.insert(arguments.begin(), program());
  return arguments;
}

int ProgramTest::run_command(const Arguments& command, double seconds) {
  Process process(command, logs_ / "log", environment_);
  const int code = process.wait(seconds);
  output_ = process.output();
  return code;
}

}  // namespace sbtrain::test
