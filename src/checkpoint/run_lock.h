// One job per run folder.
#pragma once

#include <filesystem>

#include "checkpoint/storage.h"

namespace sbtrain {

// Holds <run>/lock as long as the object lives, or until the process ends in any way. The file says
// who holds the lock (pid and host). It is never removed; its existence means nothing by itself.
class RunLock {
 public:
  // Creates the folder if needed. A second job gets ExitCode::kUsage naming the first one's pid
  // and host.
  explicit RunLock(const std::filesystem::path& run);
  ~RunLock();
  RunLock(RunLock&&) noexcept = default;
  RunLock& operator=(RunLock&&) = delete;

  // Throws ExitCode::kStorage if the folder is no longer at its path, because it was moved or
  // removed: a second job could then lock another folder there. Cheap enough for every step.
  void check() const;

 private:
  std::filesystem::path run_;
  FileDescriptor fd_;
};

}  // namespace sbtrain
