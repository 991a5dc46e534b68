// The log that every rank of a job keeps in the run folder.
#pragma once

#include <filesystem>

namespace sbtrain {

// <run>/logs/rank-00003.log
std::filesystem::path rank_log_path(const std::filesystem::path& run, int rank);

// From now on, what is logged also goes to the rank's file, after what earlier starts have left
// there. A file that cannot be opened is a warning; a line that cannot be written (a full disk) is
// lost without a word.
void open_rank_log(const std::filesystem::path& run, int rank);

}  // namespace sbtrain
