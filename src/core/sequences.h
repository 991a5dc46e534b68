// Document boundaries of one packed micro-batch.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace sbtrain {

struct ContextShare;  // core/context_share.h

// `count` documents follow each other in T packed tokens; document n is tokens
// [cu_seqlens[n], cu_seqlens[n+1]). Attention never crosses a boundary.
struct Sequences {
  Tensor cu_seqlens;       // i32 [count + 1] at least, on the device; starts at 0, ends at T
  Tensor positions_T;      // i32 [T]: 0, 1, 2, ... within each document
  int64_t count = 0;       // documents in this micro-batch
  int64_t max_seqlen = 0;  // an upper bound of every document's length, the same in every step
  // The length that rotary positions are scaled for, where that is less than max_seqlen, which is
  // only a bound of buffers then: what a prompt may grow to while it is continued. 0: max_seqlen.
  int64_t reach = 0;
  // Where ranks share the tokens of a micro-batch, this rank's part, which has the documents: only
  // positions_T, which go on from earlier ranks, and reach are set here. Null: it has all tokens.
  const ContextShare* context = nullptr;
  int64_t rope_length() const { return reach > 0 ? reach : max_seqlen; }
};

}  // namespace sbtrain
