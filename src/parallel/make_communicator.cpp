#include "parallel/make_communicator.h"

#include "core/error.h"
#if SBTRAIN_HAS_NCCL
#include "parallel/nccl.h"
#endif
#if SBTRAIN_HAS_MPI
#include "parallel/mpi.h"
#endif

namespace sbtrain {

std::unique_ptr<Communicator> make_communicator(Control& control, Backend backend) {
  if (control.world() == 1) return make_single_process();
  if (backend == Backend::kCuda) {
#if SBTRAIN_HAS_NCCL
    return make_nccl(control);
#else
    fail(ExitCode::kUsage,
         "{} ranks on GPUs need NCCL, which was not found when sbtrain was built: install "
         "libnccl-dev and build again, or train on one GPU",
         control.world());
#endif
  }
#if SBTRAIN_HAS_MPI
  return make_mpi(control);
#else
  fail(ExitCode::kUsage,
       "{} ranks on the CPU need MPI, which was not found when sbtrain was built: install "
       "libopenmpi-dev and build again, or train with one rank",
       control.world());
#endif
}

}  // namespace sbtrain
