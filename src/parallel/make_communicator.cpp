#include "parallel/make_communicator.h"

#include <cstdlib>
#include <string_view>

#include "core/build_options.h"
#include "core/device.h"
#include "core/error.h"
#if SBTRAIN_HAS_NCCL
#include "parallel/nccl.h"
#endif
#if SBTRAIN_HAS_MPI
#include "parallel/mpi.h"
#endif

namespace sbtrain {

std::unique_ptr<Communicator> make_communicator(
    Control& control, Backend backend, [[maybe_unused]] const CommunicatorOptions& options) {
  if (control.world() == 1) return make_single_process();
  if (backend == Backend::kCuda) {
#if SBTRAIN_HAS_NCCL
    return make_nccl(control, options);
#else
    fail(ExitCode::kUsage, "{} ranks on GPUs need NCCL. {}, or train on one GPU", control.world(),
         rank_library(backend).problem);
#endif
  }
#if SBTRAIN_HAS_MPI
  return make_mpi(control);
#else
  fail(ExitCode::kUsage, "{} ranks on the CPU need MPI. {}, or train with one rank",
       control.world(), rank_library(backend).problem);
#endif
}

FoundLibrary rank_library(Backend backend) {
  if (backend == Backend::kCuda) {
#if SBTRAIN_HAS_NCCL
    return find_nccl();
#else
    return {.name = "NCCL",
            .problem =
                "NCCL 2.28 or later was not found when sbtrain was built: install "
                "libnccl-dev and build again"};
#endif
  }
#if SBTRAIN_HAS_MPI
  return find_mpi();
#else
  return {.name = "MPI",
          .problem =
              "MPI was not found when sbtrain was built: install libopenmpi-dev and build "
              "again"};
#endif
}

void prepare_memory(Memory& memory, const CommunicatorOptions& options, int world) {
  if (!options.copy_engines || world == 1 || memory.backend() != Backend::kCuda) return;
  memory.set_collective_allocator(
      [](size_t bytes) { return collective_memory(Backend::kCuda, bytes); });
}

bool nccl_may_reach_other_gpus() {
  const auto is = [](const char* name, std::string_view value) {
    const char* set = std::getenv(name);
    return set != nullptr && set == value;
  };
  return !is("NCCL_P2P_DISABLE", "1") && !is("NCCL_CUMEM_ENABLE", "0") &&
         !is("NCCL_WIN_ENABLE", "0");
}

std::shared_ptr<void> collective_memory(Backend backend, size_t bytes) {
#if SBTRAIN_HAS_NCCL
  if (backend == Backend::kCuda) return nccl_allocate(bytes);
#endif
  void* data = device_allocate(backend, bytes);
  if (!data) return nullptr;
  return {data, [backend](void* of) { device_free(backend, of); }};
}

}  // namespace sbtrain
