// The functions of NCCL, whose library of 220 MB is loaded by the first communicator between GPUs.
#pragma once

#include <nccl.h>

namespace sbtrain {

#define SBTRAIN_NCCL_FUNCTIONS(F) \
  F(AllGather)                    \
  F(AllReduce)                    \
  F(AlltoAll)                     \
  F(Broadcast)                    \
  F(CommAbort)                    \
  F(CommDeregister)               \
  F(CommDestroy)                  \
  F(CommGetAsyncError)            \
  F(CommInitRankConfig)           \
  F(CommRegister)                 \
  F(CommSplit)                    \
  F(CommWindowDeregister)         \
  F(CommWindowRegister)           \
  F(Gather)                       \
  F(GetErrorString)               \
  F(GetLastError)                 \
  F(GetUniqueId)                  \
  F(GetVersion)                   \
  F(GroupEnd)                     \
  F(GroupStart)                   \
  F(MemAlloc)                     \
  F(MemFree)                      \
  F(Recv)                         \
  F(ReduceScatter)                \
  F(Send)

// nccl().AllGather is ncclAllGather, and so on.
struct NcclFunctions {
// A name cannot stand in parentheses where it is declared.
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define SBTRAIN_MEMBER(name) decltype(&::nccl##name) name = nullptr;
  SBTRAIN_NCCL_FUNCTIONS(SBTRAIN_MEMBER)
#undef SBTRAIN_MEMBER
};

// Throws ExitCode::kConfig where the library is missing or older than 2.28, and says which it is.
const NcclFunctions& nccl();

}  // namespace sbtrain
