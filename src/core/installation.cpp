#include "core/installation.h"

namespace sbtrain {

namespace fs = std::filesystem;

fs::path program_files(const fs::path& program) {
  const fs::path folder = program.parent_path();
  fs::path files;
  if (folder.filename() == "bin") files = folder.parent_path() / "share/sbtrain";
  if (folder.parent_path().filename() == "build") files = folder.parent_path().parent_path();
  std::error_code none;
  return fs::is_directory(files / "configs", none) ? files : fs::path();
}

fs::path program_files() {
  std::error_code error;
  return program_files(fs::read_symlink("/proc/self/exe", error));
}

std::string configuration_file(const std::string& path) {
  std::error_code none;
  if (!path.starts_with("configs/") || fs::exists(path, none)) return path;
  const fs::path files = program_files();
  if (files.empty() || !fs::exists(files / path, none)) return path;
  return (files / path).string();
}

}  // namespace sbtrain
