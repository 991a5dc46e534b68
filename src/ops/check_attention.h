// Checks that the dispatchers of attention ops share.
#pragma once

#include "core/sequences.h"
#include "ops/check.h"

namespace sbtrain::ops {

inline void check_documents(std::string_view op, const Sequences& sequences, int64_t tokens) {
  const Tensor& bounds = sequences.cu_seqlens;
  if (bounds.defined() && bounds.dtype == DType::kI32 && bounds.contiguous() &&
      sequences.count >= 0 && bounds.numel() > sequences.count &&
      (tokens == 0 || sequences.max_seqlen > 0)) {
    return;
  }
  fail(ExitCode::kInternal, "{}: {} documents of at most {} tokens need i32 cu_seqlens, got {}", op,
       sequences.count, sequences.max_seqlen, bounds.describe());
}

// x is [rows, heads * d]; returns d.
inline int64_t check_heads(std::string_view op, std::string_view name, const Tensor& x,
                           int64_t rows, int heads) {
  check_matrix(op, name, x, DType::kF32, rows, x.cols());
  if (heads > 0 && x.cols() % heads == 0) return x.cols() / heads;
  fail(ExitCode::kInternal, "{}: {} heads do not divide {} {}", op, heads, name, x.describe());
}

}  // namespace sbtrain::ops
