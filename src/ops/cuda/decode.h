// What the launchers of decoding kernels share.
#pragma once

#include "kernels/decode.h"
#include "ops/cuda/arguments.h"
#include "ops/ops.h"

namespace sbtrain::ops::cuda {

inline kernels::Decode decode_arguments(const DecodeTensors& t, int heads, float scale) {
  return {.o = bf16(t.o_BHd),
          .o_stride = t.o_BHd.row_stride,
          .q = bf16(t.q_BHd),
          .q_stride = t.q_BHd.row_stride,
          .k_cache = bf16(t.k_cache_BCHd),
          .v_cache = bf16(t.v_cache_BCHd),
          .lengths = t.lengths_B.i32(),
          .batch = t.q_BHd.rows(),
          .capacity = t.k_cache_BCHd.shape[1],
          .heads = heads,
          .head_dim = static_cast<int>(t.q_BHd.cols() / heads),
          .scale = scale};
}

}  // namespace sbtrain::ops::cuda
