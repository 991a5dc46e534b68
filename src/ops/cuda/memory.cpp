#include "ops/memory.h"

#include "kernels/memory.h"
#include "ops/cuda/arguments.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {
namespace {

kernels::Copy arguments(std::string_view op, const Tensor& y, const Tensor& x) {
  if (!type_fits(y.dtype, x.dtype)) {
    fail(ExitCode::kInternal, "{}: no conversion from {} to {}", op, x.describe(), y.describe());
  }
  return {.y = arg(y),
          .y_type = kernel_type(y.dtype),
          .x = arg(x),
          .x_type = kernel_type(x.dtype),
          .rows = y.rows(),
          .cols = y.cols()};
}

}  // namespace

void run(Cuda, Stream& s, const Fill& op) {
  kernels::fill(cuda_stream(s), {.x = arg(op.x),
                                 .type = kernel_type(op.x.dtype),
                                 .rows = op.x.rows(),
                                 .cols = op.x.cols(),
                                 .value = op.value});
}

void run(Cuda, Stream& s, const Copy& op) {
  kernels::copy(cuda_stream(s), arguments(Copy::kName, op.y, op.x));
}

void run(Cuda, Stream& s, const Add& op) {
  kernels::add(cuda_stream(s), arguments(Add::kName, op.y, op.x));
}

void run(Cuda, Stream& s, const SumParts& op) {
  kernels::sum_parts(cuda_stream(s), {.y = op.y_N.f32(),
                                      .x = arg(op.x_RN),
                                      .own_row = op.own_N.data,
                                      .own = op.own,
                                      .type = kernel_type(op.x_RN.dtype),
                                      .rows = op.x_RN.rows(),
                                      .cols = op.x_RN.cols(),
                                      .add = op.add});
}

void run(Cuda, Stream& s, const CopyFromHost& op) {
  Context& c = context(s);
  c.staging.upload(c.stream, op.y.data, op.host, op.y.bytes());
}

void run(Cuda, Stream& s, const FetchFromHost& op) {
  SBTRAIN_CUDA_CHECK(
      cudaMemcpyAsync(op.y.data, op.host, op.y.bytes(), cudaMemcpyHostToDevice, context(s).stream));
}

void run(Cuda, Stream& s, const CopyToHost& op) {
  Context& c = context(s);
  c.staging.download(c.stream, op.host, op.x.data, op.x.bytes());
  c.after_wait();
}

}  // namespace sbtrain::ops::cuda
