// The Python files that the program carries, and how one of them is run.
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

struct PythonResult {
  int code = 0;
  std::string output;  // what it printed; if it failed, with its last errors
};

// Runs a script with arguments and waits for it. Throws ExitCode::kData if the interpreter cannot
// be started.
PythonResult run_python(const PythonFile& script, const std::vector<std::string>& arguments);

}  // namespace sbtrain
