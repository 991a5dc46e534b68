#include "support/program.h"

#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace sbtrain::test {
namespace {

void must(std::vector<std::string> arguments, const std::filesystem::path& log) {
  arguments.insert(arguments.begin(), program());
  Process process(arguments, log, {{"OMP_WAIT_POLICY", "passive"}});
  if (process.wait() != 0) throw std::runtime_error(process.output());
}

}  // namespace

std::string program() {
  const char* other = std::getenv("TEST_PROGRAM");
  return other == nullptr ? SBTRAIN_PROGRAM : other;
}

void make_training_files(const std::filesystem::path& folder,
                         const std::map<std::string, std::string>& texts) {
  const std::filesystem::path log = folder / "log";
  const std::string tokenizer = folder / "tokenizer.model";
  must(
      {"tokenizer", "train", "--input", SBTRAIN_TEST_TEXT, "--vocab", "400", "--output", tokenizer},
      log);
  for (const auto& [name, lines] : texts) {
    const std::string text = folder / (name + ".jsonl");
    write_file(text, lines);
    must(
        {"prepare", "--input", text, "--tokenizer", tokenizer, "--output", folder / (name + ".h5")},
        log);
  }
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
