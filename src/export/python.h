// The Python files that the program carries, and the interpreter that runs them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

struct PythonFile {
  std::string_view name;
  std::string_view text;
};

// configuration_sbtrain.py and modeling_sbtrain.py, which go into an exported folder.
std::vector<PythonFile> model_code();
// Compares logits (verify_logits.py).
PythonFile verify_script();

// $SBTRAIN_PYTHON; else that of .venv/ beside the build folder, where `scripts/setup.sh python` has
// made one; else Debian's; else the first in PATH.
std::string python_interpreter();

struct PythonResult {
  int code = 0;
  std::string output;  // of both streams
};

// Runs a script with arguments and waits for it. Throws ExitCode::kUsage if the interpreter cannot
// be started.
PythonResult run_python(const PythonFile& script, const std::vector<std::string>& arguments);

}  // namespace sbtrain
