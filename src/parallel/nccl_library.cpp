#include "parallel/nccl_library.h"

#include "core/shared_library.h"

namespace sbtrain {
namespace {

NcclFunctions load() {
  const SharedLibrary library("NCCL", {"libnccl.so.2", SBTRAIN_NCCL_LIBRARY},
                              "install NCCL 2.28 or later, or use one GPU (train.gpus: 1)");
  NcclFunctions functions;
#define SBTRAIN_FIND(name) library.find(functions.name, "nccl" #name);
  SBTRAIN_NCCL_FUNCTIONS(SBTRAIN_FIND)
#undef SBTRAIN_FIND
  return functions;
}

}  // namespace

const NcclFunctions& nccl() {
  static const NcclFunctions kFunctions = load();
  return kFunctions;
}

}  // namespace sbtrain
