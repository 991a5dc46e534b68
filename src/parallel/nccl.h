// Collectives between GPUs by NCCL: one process a GPU, NVLink inside a node, the network across.
#pragma once

#include <cstddef>
#include <memory>

#include "core/shared_library.h"
#include "parallel/make_communicator.h"

namespace sbtrain {

// All ranks of the job, each on its process's current CUDA device. The sums of a collective are
// added along NCCL's rings, whose order depends on the ranks and the machines alone, unless the
// variable NCCL_ALGO says otherwise. When the job fails, the communicator is aborted: the kernels
// that wait for lost ranks end, with undefined results, and every later call throws the job's
// failure. Whoever waits for a stream must therefore ask Control::check before it uses what it
// waited for.
std::unique_ptr<Communicator> make_nccl(Control& control, const CommunicatorOptions& options);

// Device memory that other GPUs can reach directly. Null if there is none.
std::shared_ptr<void> nccl_allocate(size_t bytes);

// The library that make_nccl would use. Needs no GPU.
FoundLibrary find_nccl();

}  // namespace sbtrain
