// Filling, copying and adding tensors, and copies between host and device.
#pragma once

#include "kernels/memory.h"
#include "ops/op.h"

namespace sbtrain::ops {

struct Fill {
  static constexpr std::string_view kName = "fill";
  Tensor x;
  float value;
  void check() const {}
  kernels::Fill kernel() const { return {x, x.dtype, x.rows(), x.cols(), value}; }
};

// y = x, same shape; the types are the same, or both f32 or bf16.
struct Copy {
  static constexpr std::string_view kName = "copy";
  Tensor y;
  Tensor x;
  void check() const {
    const bool converts = is_real(x.dtype) && is_real(y.dtype);
    Check(kName).matrix("x", x, y.rows(), y.cols(), converts ? x.dtype : y.dtype);
  }
  kernels::Copy kernel() const { return {y, y.dtype, x, x.dtype, y.rows(), y.cols()}; }
};

// y += x, same shape; either is f32 or bf16.
struct Add {
  static constexpr std::string_view kName = "add";
  Tensor y;
  Tensor x;
  void check() const {
    Check(kName).matrix("y", y);
    Check(kName).matrix("x", x, y.rows(), y.cols());
  }
  kernels::Add kernel() const { return {{y, y.dtype, x, x.dtype, y.rows(), y.cols()}}; }
};

// y_N (f32) = the sum of the rows of x_RN (f32 or bf16), added in f32 in their order, where row
// `own` is own_N instead, of the same type; += if `add`. y does not overlap the others.
struct SumParts {
  static constexpr std::string_view kName = "sum_parts";
  Tensor y_N;
  Tensor x_RN;
  Tensor own_N;
  int64_t own;
  bool add = false;
  void check() const {
    Check(kName).flat("y", y_N, x_RN.cols(), DType::kF32);
    Check(kName).matrix("x", x_RN);
    Check(kName).flat("own", own_N, x_RN.cols(), x_RN.dtype);
  }
  kernels::SumParts kernel() const {
    return {y_N, x_RN, own_N.data, own, x_RN.dtype, x_RN.rows(), x_RN.cols(), add};
  }
};

// y = the y.bytes() bytes at `host`; y is contiguous. The host memory may be reused at once.
struct CopyFromHost {
  static constexpr std::string_view kName = "copy_from_host";
  Tensor y;
  const void* host;
  void check() const { Check(kName).flat("y", y, y.numel(), y.dtype); }
};

// y = the y.bytes() bytes that are at `host` when the stream comes to this op; y is contiguous. The
// host memory is page-locked (core/pinned_memory.h) and must stay; other threads may change it
// meanwhile, number by number.
struct FetchFromHost {
  static constexpr std::string_view kName = "fetch_from_host";
  Tensor y;
  const void* host;
  void check() const { Check(kName).flat("y", y, y.numel(), y.dtype); }
};

// Copies x, which is contiguous, to `host` and waits until the bytes have arrived.
struct CopyToHost {
  static constexpr std::string_view kName = "copy_to_host";
  void* host;
  Tensor x;
  void check() const { Check(kName).flat("x", x, x.numel(), x.dtype); }
};

// Starts to copy x, which is contiguous, to `host`. The copy is part of the stream's work: an event
// tells when it is done. On a GPU the host goes on meanwhile if its memory is page-locked
// (core/pinned_memory.h), and waits otherwise.
struct StartCopyToHost {
  static constexpr std::string_view kName = "start_copy_to_host";
  void* host;
  Tensor x;
  void check() const { Check(kName).flat("x", x, x.numel(), x.dtype); }
};

// Waits until everything on the stream is done.
struct Synchronize {
  static constexpr std::string_view kName = "synchronize";
  void check() const {}
};

namespace cpu {
void run(Cpu, Stream& s, const Fill& op);
void run(Cpu, Stream& s, const Copy& op);
void run(Cpu, Stream& s, const Add& op);
void run(Cpu, Stream& s, const SumParts& op);
void run(Cpu, Stream& s, const CopyFromHost& op);
void run(Cpu, Stream& s, const FetchFromHost& op);
void run(Cpu, Stream& s, const CopyToHost& op);
void run(Cpu, Stream& s, const StartCopyToHost& op);
void run(Cpu, Stream& s, const Synchronize& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const CopyFromHost& op);
void run(Cuda, Stream& s, const FetchFromHost& op);
void run(Cuda, Stream& s, const CopyToHost& op);
void run(Cuda, Stream& s, const StartCopyToHost& op);
void run(Cuda, Stream& s, const Synchronize& op);
}  // namespace cuda

}  // namespace sbtrain::ops
