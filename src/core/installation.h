// Where the files that belong to the program are: configurations, scripts, texts.
#pragma once

#include <filesystem>
#include <string>

namespace sbtrain {

// The folder that holds configs/ and data/: PREFIX/share/sbtrain of PREFIX/bin/sbtrain, the source
// tree of build/PRESET/sbtrain; empty for a program that lies anywhere else.
std::filesystem::path program_files(const std::filesystem::path& program);
std::filesystem::path program_files();  // of the running program

// `path` if there is such a file. Otherwise, if it begins with "configs/", that of the program's
// files, where it is there: the configurations that come with sbtrain have the same names in a
// checkout and anywhere else.
std::string configuration_file(const std::string& path);

}  // namespace sbtrain
