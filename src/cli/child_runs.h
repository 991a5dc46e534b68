// Training runs as child processes, several at a time, each with a share of the machine.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace sbtrain {

// The share of the machine that one child has.
struct ChildSlot {
  std::string gpus;  // for CUDA_VISIBLE_DEVICES; empty: as it is
  int threads = 0;   // for OMP_NUM_THREADS, unless that is set; 0: as it is
};

// Slots for `jobs` children at a time on a machine with `gpus` visible GPUs (0: the CPU) and
// `processors`. jobs = 0: one for each GPU, and one on the CPU. `visible` is CUDA_VISIBLE_DEVICES,
// or empty. GPUs that cannot be shared out evenly stay idle; a single child sees all; of more jobs
// than GPUs, several have the same one.
std::vector<ChildSlot> make_slots(int jobs, int gpus, const std::string& visible, int processors);

class ChildRuns {
 public:
  explicit ChildRuns(std::vector<ChildSlot> slots);

  bool full() const { return running_.size() == slots_.size(); }
  bool empty() const { return running_.empty(); }
  size_t slots() const { return slots_.size(); }

  // Starts `sbtrain ARGUMENTS`. Its output is appended to `log`, or is that of this process if that
  // is empty. However this process ends, the kernel then asks the child to stop (SIGTERM), so that
  // it saves and does not train on unseen. To be called by one thread, which must outlive the
  // children, and only if not full(). Throws ExitCode::kOutOfMemory, ExitCode::kStorage.
  void start(size_t id, const std::vector<std::string>& arguments,
             const std::filesystem::path& log);

  // A child that has ended, once for each.
  struct Ended {
    size_t id = 0;
    int code = 0;  // its exit code, 128 + n after signal n
    double seconds = 0;
  };
  std::optional<Ended> take_ended();

  // Sends a signal to all children.
  void signal(int number) const;

 private:
  struct Child {
    pid_t pid = -1;
    size_t id = 0;
    size_t slot = 0;
    std::chrono::steady_clock::time_point start;
  };
  size_t free_slot() const;

  std::vector<ChildSlot> slots_;
  std::vector<Child> running_;
};

}  // namespace sbtrain
