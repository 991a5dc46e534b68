// Runs Python for what only a Python library does.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "core/file_descriptor.h"

namespace sbtrain {

// The interpreter that the scripts use too (scripts/python.sh): $SBTRAIN_PYTHON where it is set,
// that of .venv in a folder above the program where there is one, otherwise /usr/bin/python3,
// otherwise the python3 in PATH.
std::string python_interpreter();

// A child process that runs a Python program. It has a process group of its own, so that Ctrl-C
// does not end it while its parent still needs it; the destructor ends it.
class PythonHelper {
 public:
  // `input` is what the child reads from its standard input. Throws ExitCode::kData, with
  // `purpose`, if Python cannot be started.
  PythonHelper(std::string_view program, const std::vector<std::string>& arguments,
               std::string_view input, const std::string& purpose);
  ~PythonHelper();
  PythonHelper(const PythonHelper&) = delete;
  PythonHelper& operator=(const PythonHelper&) = delete;

  // The read end of the child's standard output; may be taken away once.
  FileDescriptor take_output() { return std::move(output_); }
  const std::string& interpreter() const { return interpreter_; }

  struct Result {
    int status = 0;        // the exit code, or 128 + the number of the signal that ended it
    std::string errors{};  // what it wrote to standard error, the last 4 KiB
  };
  // Waits for the end of the child.
  Result wait();

 private:
  std::string interpreter_;
  FileDescriptor output_;
  FileDescriptor errors_;
  pid_t pid_ = -1;
};

}  // namespace sbtrain
