// What the launchers of attention kernels share.
#pragma once

#include <string_view>

#include "core/error.h"
#include "kernels/attention/softmax.h"
#include "ops/ops.h"

namespace sbtrain::ops::cuda {

inline kernels::HeadRows head_rows(const Tensor& t) {
  auto* const data = reinterpret_cast<__nv_bfloat16*>(t.bf16());
  require(reinterpret_cast<uintptr_t>(data) % 16 == 0 && t.row_stride % 8 == 0,
          "attention: rows must begin at multiples of 16 bytes");
  return {data, t.row_stride};
}

inline int attention_head_dim(std::string_view what, const Tensor& q_THd, int heads) {
  const int64_t head_dim = q_THd.cols() / heads;
  if (head_dim > 128 || head_dim % 8 != 0) {
    fail(ExitCode::kConfig,
         "{} on CUDA: the head dimension is {} (model.width / model.heads), not a multiple of 8 "
         "up to 128",
         what, head_dim);
  }
  return static_cast<int>(head_dim);
}

}  // namespace sbtrain::ops::cuda
