// Runs Python for what only a Python library does.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "core/file_descriptor.h"

namespace sbtrain {

// The interpreter that the scripts use too (scripts/python.sh): $SBTRAIN_PYTHON where it is set,
// that of the virtual environment that is active ($VIRTUAL_ENV), own_python of this program,
// otherwise the python3 in PATH.
std::string python_interpreter();

// The interpreter in the .venv of a program's source tree, where the program is build/PRESET/NAME,
// or of its installation, where it is bin/NAME; empty if there is none. One that belongs to
// someone else than root, the user or the owner of the program, or that others may write to, is not
// taken, with a warning: it would run as the user.
std::string own_python(const std::string& program);

// How to get a Python package, for messages. The interpreters of distributions refuse pip.
std::string python_advice(std::string_view package);

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
