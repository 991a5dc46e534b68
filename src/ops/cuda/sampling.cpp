#include "ops/sampling.h"

#include "kernels/sampling.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const Argmax& op) {
  kernels::argmax(cuda_stream(s),
                  {.y = arg(op.y_B), .x = arg(op.x_BV), .rows = op.x_BV.rows(), .vocab = op.vocab});
}

}  // namespace sbtrain::ops::cuda
