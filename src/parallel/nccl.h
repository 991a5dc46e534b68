// Collectives between GPUs by NCCL: one process a GPU, NVLink inside a node, the network across.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "parallel/communicator.h"
#include "parallel/control.h"

namespace sbtrain {

struct NcclOptions {
  // Thread blocks, and so multiprocessors, that a collective takes from the matrix products beside
  // it; 0: NCCL chooses.
  int min_ctas = 0;
  int max_ctas = 0;
  // Gathers between registered memory by the copy engines, which take no multiprocessors. The
  // memory must come from nccl_allocate.
  bool copy_engines = false;
  // Until all ranks have connected.
  std::chrono::seconds connect_timeout{300};
};

// All ranks of the job, each on its process's current CUDA device. The sums of a collective are
// added along NCCL's rings, whose order depends on the ranks and the machines alone, unless the
// variable NCCL_ALGO says otherwise. When the job fails, the communicator is aborted: the kernels
// that wait for lost ranks end, with undefined results, and every later call throws the job's
// failure. Whoever waits for a stream must therefore ask Control::check before it uses what it
// waited for.
std::unique_ptr<Communicator> make_nccl(Control& control, const NcclOptions& options = {});

// Device memory that other GPUs can reach directly. Throws ExitCode::kOutOfMemory.
std::shared_ptr<void> nccl_allocate(size_t bytes);

}  // namespace sbtrain
