// Runs the program from tests, each in a folder of its own.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "support/process.h"

namespace sbtrain::test {

// The program to test. TEST_PROGRAM in the environment names another one, such as that of a
// release; the program takes names that begin with SBTRAIN_ for keys of the configuration.
std::string program();

// Runs the program, which writes to `log`; throws what it says unless it ends with exit code 0.
void must_run(std::vector<std::string> arguments, const std::filesystem::path& log,
              const std::map<std::string, std::string>& environment);

// Files that tests train on: a tokenizer of 400 pieces of the test's text, and a document store
// NAME.h5, with its text NAME.jsonl, for each entry of `texts`.
void make_training_files(const std::filesystem::path& folder,
                         const std::map<std::string, std::string>& texts);

// The step of the last whole line of a run's metrics.jsonl, or -1 if there is none. Tests that wait
// for a step ask again and again, so only that line is read.
int64_t last_recorded_step(const std::filesystem::path& run);

class ProgramTest : public testing::Test {
 protected:
  using Arguments = std::vector<std::string>;

  // A path in this test's own folder.
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  // `sbtrain ARGUMENTS` as a command.
  static Arguments command(Arguments arguments);
  // Runs a command and returns its exit code; output_ is what it wrote to both streams. One that
  // takes longer is ended, and the test fails.
  int run_command(const Arguments& command, double seconds);
  int run(const Arguments& arguments, double seconds) {
    return run_command(command(arguments), seconds);
  }
  int run(const Arguments& arguments) { return run(arguments, deadline_); }
  bool says(const std::string& text) const { return output_.find(text) != std::string::npos; }

  std::map<std::string, std::string> environment_ = {{"OMP_WAIT_POLICY", "passive"}};
  double deadline_ = 120;  // seconds
  TemporaryFolder folder_;
  std::string output_;

 private:
  TemporaryFolder logs_;
};

}  // namespace sbtrain::test
