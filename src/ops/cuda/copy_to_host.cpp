#include "ops/copy_to_host.h"

#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const StartCopyToHost& op) {
  SBTRAIN_CUDA_CHECK(
      cudaMemcpyAsync(op.host, op.x.data, op.x.bytes(), cudaMemcpyDeviceToHost, s.queue()));
}

}  // namespace sbtrain::ops::cuda
