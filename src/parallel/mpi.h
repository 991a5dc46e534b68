// Collectives between ranks on the CPU by MPI: how sharded training is tested without GPUs.
#pragma once

#include <memory>

#include "core/shared_library.h"
#include "job/control.h"
#include "parallel/communicator.h"

namespace sbtrain {

// All ranks of the job, which mpirun (or another launcher that MPI knows) has started. Sums are
// added in rank order. Before a collective moves anything its ranks compare what they call: if they
// differ, all of them throw ExitCode::kInternal, which names both calls. A wait ends with the job's
// failure as soon as Control knows of one.
// The first call starts MPI. The destructor of the last communicator ends it, unless the job
// failed. Throws ExitCode::kUsage when MPI's ranks are not those of the job, and ExitCode::kConfig
// where MPI's library is missing.
std::unique_ptr<Communicator> make_mpi(Control& control);

// The library that make_mpi would use. Starts nothing.
FoundLibrary find_mpi();

}  // namespace sbtrain
