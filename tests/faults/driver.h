// Runs the program under faults: limits of the shell, streams that are closed, full or end, inputs
// that are no files, damaged bytes. Each run has a deadline: a hang is a failure.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "support/process.h"

namespace sbtrain::test {

namespace fs = std::filesystem;

// Sanitizers map terabytes of addresses, so limits of address space say nothing under them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// How often random faults are tried: `few` times FAULT_ROUNDS (1 unless set).
int rounds(int few);

// A folder with a tokenizer, two stores of its own text and one trained run, made once; each test
// has an empty folder beside it.
class Faults : public testing::Test {
 protected:
  static void SetUpTestSuite();
  static void TearDownTestSuite();
  void SetUp() override;

  // What all tests share; none may change it.
  static std::string shared(const std::string& name) { return (*shared_ / name).string(); }
  static std::string tokenizer() { return shared("tokenizer.model"); }
  static std::string store() { return shared("a.h5"); }
  static std::string config() { return shared("config.yaml"); }
  static std::string trained() { return shared("run"); }
  // This test's own.
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::vector<std::string> left() const;  // names in this test's folder, sorted

  using Arguments = std::vector<std::string>;
  // The exit code of `sbtrain ARGUMENTS`; output() is what it printed to both streams.
  int run(const Arguments& arguments, double seconds = 60);
  // In bash, after `setup` (such as "ulimit -f 8"), with `redirection` (such as "2>&-") following
  // the command. The code is the program's own, also at the head of a pipe.
  int run_in(const std::string& setup, const Arguments& arguments,
             const std::string& redirection = "", double seconds = 60);
  // The shell's limit of address space that leaves `mebibytes` beside the program's own libraries,
  // which are gigabytes where it is built for GPUs.
  std::string address_limit(int mebibytes);
  const std::string& output() const { return output_; }
  bool says(const std::string& text) const { return output_.find(text) != std::string::npos; }

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
  TemporaryFolder folder_;
  TemporaryFolder logs_;
  std::string output_;
};

// Flips one bit of a file.
void flip_bit(const fs::path& file, uint64_t bit);
// Replaces bytes of a document store and makes its checksums and seal fit again, as a faulty or
// hostile writer would.
void craft_tokens(const fs::path& store, const std::string& tokens, size_t at_byte);

}  // namespace sbtrain::test
