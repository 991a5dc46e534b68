// The program under faults: limits of the shell, streams that are closed, full or end early, inputs
// that are not files, damaged bytes. Each run has a deadline, so a hang is a failure.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "support/program.h"

namespace sbtrain::test {

namespace fs = std::filesystem;

// Sanitizers map terabytes of addresses, so limits on the address space cannot be tested with them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Exit codes of the program (docs/reliability.md); a run that does not fit its configuration has
// that of one.
inline constexpr int kDone = 0, kUsage = 2, kConfig = 3, kMismatch = 3, kData = 4,
                     kNoCheckpoint = 5, kDiverged = 6, kMemory = 8, kStorage = 9, kStopped = 85;

// The number of random faults to try: `few` times FAULT_ROUNDS (1 unless set).
int rounds(int few);

// A folder with a tokenizer, two stores of its own text and one trained run, made once for all
// tests. Each test also has an empty folder of its own.
class Faults : public ProgramTest {
 protected:
  Faults();
  static void SetUpTestSuite();
  static void TearDownTestSuite();
  void SetUp() override;

  // A file or folder that all tests share; no test may change it.
  static std::string shared(const std::string& name) { return (*shared_ / name).string(); }
  static std::string tokenizer() { return shared("tokenizer.model"); }
  static std::string store() { return shared("a.h5"); }
  static std::string config() { return shared("config.yaml"); }
  static std::string trained() { return shared("run"); }
  std::vector<std::string> left() const;  // names in this test's folder, sorted

  // Runs in bash, after `setup` (such as "ulimit -f 8"), with `redirection` (such as "2>&-") after
  // the command. Returns the program's own exit code, also at the head of a pipe.
  int run_in(const std::string& setup, const Arguments& arguments,
             const std::string& redirection = "", double seconds = 60);
  // The shell command that limits the address space to `mebibytes` more than the program's
  // libraries need, which is gigabytes in a build for GPUs.
  std::string address_limit(int mebibytes);
  // A setup for run_in with which the program runs as a user without privileges, where possible:
  // the limit on processes does not apply to the superuser.
  static std::string as_another_user(const std::string& setup);
  // A setup under which no thread can be started. LeakSanitizer would need one at the end.
  static std::string without_threads(const std::string& setup = ":");
  const std::string& output() const { return output_; }

  // Arguments of commands that nearly every test runs; `more` replaces defaults of the same name.
  static Arguments prepare(const std::string& input, const std::string& output,
                           const Arguments& more = {});
  static Arguments train(const std::string& out, const Arguments& more = {});
  static Arguments generate(const Arguments& more = {});

  std::mt19937_64 random_{20260101};

 private:
  static Arguments with_defaults(Arguments arguments, const Arguments& more,
                                 const Arguments& defaults);
  static inline TemporaryFolder* shared_ = nullptr;
};

// Flips one bit of a file.
void flip_bit(const fs::path& file, uint64_t bit);
// Replaces bytes of a document store and makes its checksums and seal fit again, as a faulty or
// hostile writer would.
void craft_tokens(const fs::path& store, const std::string& tokens, size_t at_byte);

}  // namespace sbtrain::test
