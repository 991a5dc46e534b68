// Gives a harness every file of the folders named on the command line.
#include <cstdio>
#include <filesystem>

#include "core/files.h"
#include "fuzz/harness.h"

int main(int count, char** arguments) {
  int files = 0;
  for (int i = 1; i < count; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(arguments[i])) {
      std::printf("%s\n", entry.path().c_str());
      const std::string text = sbtrain::read_input(entry.path(), sbtrain::ExitCode::kData);
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
      ++files;
    }
  }
  return files > 0 ? 0 : 1;
}
