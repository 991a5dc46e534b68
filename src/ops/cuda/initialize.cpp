#include "ops/initialize.h"

#include "kernels/initialize.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const Initialize& op) {
  const auto& key = op.random.key();
  const auto& counter = op.random.counter_high();
  kernels::initialize(cuda_stream(s), {.x = arg(op.x_N),
                                       .type = kernel_type(op.x_N.dtype),
                                       .begin = op.begin,
                                       .count = op.x_N.numel(),
                                       .rows = op.rows,
                                       .cols = op.cols,
                                       .stored_cols = op.stored_cols,
                                       .normal = op.init.kind == Init::Kind::kNormal,
                                       .value = op.init.value,
                                       .random = {{{key[0], key[1]}}, {counter[0], counter[1]}}});
}

}  // namespace sbtrain::ops::cuda
