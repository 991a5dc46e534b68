#include "parallel/nccl_library.h"

#include "core/error.h"
#include "core/shared_library.h"
#include "parallel/nccl.h"

namespace sbtrain {
namespace {

constexpr const char* kAdvice =
    "install NCCL 2.28 or later (pip install 'sbtrain[cuda]', or the package libnccl2), or use one "
    "GPU (train.gpus: 1)";

// The first version with ncclGather and ncclAlltoAll.
constexpr int kOldest = NCCL_VERSION(2, 28, 0);

SharedLibrary open_library() {
  return {"NCCL", {"libnccl.so.2", SBTRAIN_NCCL_LIBRARY}, kAdvice};
}

int version_of(const SharedLibrary& library) {
  decltype(&::ncclGetVersion) get = nullptr;
  library.find(get, "ncclGetVersion");
  int version = 0;
  get(&version);
  if (version < kOldest) {
    fail(ExitCode::kConfig, "NCCL {} ({}) is too old: {}", dotted_version(version), library.path(),
         kAdvice);
  }
  return version;
}

NcclFunctions load() {
  const SharedLibrary library = open_library();
  version_of(library);
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

FoundLibrary find_nccl() {
  return look_for("NCCL", [](FoundLibrary& found) {
    const SharedLibrary library = open_library();
    found.path = library.path();
    found.version = dotted_version(version_of(library));
  });
}

}  // namespace sbtrain
