// What attention kernels want to know of a pack beside its cu_seqlens.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

struct Pack {
  int tokens = 0, sequences = 0, max_seqlen = 0;
  const int32_t* given = nullptr;  // cu_seqlens [sequences + 1]; null: documents of max_seqlen
  int32_t* cu_seqlens = nullptr;   // [sequences + 1]: written where none are given
  int32_t* positions = nullptr;    // [T]: of each token in its document
};

// Writes the positions and, where none are given, the cu_seqlens. Given ones that do not rise from
// 0 to T in steps of at most max_seqlen stop the kernel: the kernels behind it would read and write
// outside of their tensors.
void describe_pack(cudaStream_t stream, const Pack& pack);

}  // namespace sbtrain::kernels
