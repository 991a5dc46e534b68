#include "ops/memory.h"

#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

void run(Cuda, Stream& s, const CopyFromHost& op) {
  Context& c = context(s);
  c.staging.upload(c.stream, op.y.data, op.host, op.y.bytes());
}

void run(Cuda, Stream& s, const CopyToHost& op) {
  Context& c = context(s);
  c.staging.download(c.stream, op.host, op.x.data, op.x.bytes());
  c.after_wait();
}

}  // namespace sbtrain::ops::cuda
