#include "ops/memory.h"

#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const CopyFromHost& op) {
  Context& c = context(s);
  c.staging.upload(c.stream, op.y.data, op.host, op.y.bytes());
}

void run(Cuda, Stream& s, const FetchFromHost& op) {
  SBTRAIN_CUDA_CHECK(
      cudaMemcpyAsync(op.y.data, op.host, op.y.bytes(), cudaMemcpyHostToDevice, s.queue()));
}

void run(Cuda, Stream& s, const CopyToHost& op) {
  Context& c = context(s);
  c.staging.download(c.stream, op.host, op.x.data, op.x.bytes());
  c.after_wait();
}

void run(Cuda, Stream& s, const StartCopyToHost& op) {
  SBTRAIN_CUDA_CHECK(
      cudaMemcpyAsync(op.host, op.x.data, op.x.bytes(), cudaMemcpyDeviceToHost, s.queue()));
}

}  // namespace sbtrain::ops::cuda
