// Filling, copying and adding tensors, and copies between host and device.
#pragma once

#include <memory>
#include <span>
#include <string>

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

// y = x, same shape; types may differ.
struct Copy {
  static constexpr std::string_view kName = "copy";
  Tensor y;
  Tensor x;
  void check() const { Check(kName).matrix("x", x, y.rows(), y.cols(), y.dtype); }
  kernels::Copy kernel() const { return {y, y.dtype, x, x.dtype, y.rows(), y.cols()}; }
};

// y += x, same shape.
struct Add {
  static constexpr std::string_view kName = "add";
  Tensor y;
  Tensor x;
  void check() const {
    Check(kName).matrix("y", y);
    Check(kName).same("x", x, y);
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

// Stream::wait, timed like an op: the time of "await" is how long the stream stood idle.
void await(Stream& s, const Event& event);

// Between these two calls, ops that can run in several ways time them and keep the fastest; what
// they write is undefined. `known` holds the choices of an earlier run on such a device, which are
// kept. end_tuning() returns all choices known now ("" on backends where ops run in one way only)
// and, if told to remember them, keeps them for later programs. Ranks that time the same ops may
// choose differently, so only the one whose choices they all use may remember its own.
void begin_tuning(Stream& s, const std::string& known);
std::string end_tuning(Stream& s, bool remember = true);
// Ops on the stream use these choices, as end_tuning() returned them, perhaps to another rank.
void set_choices(Stream& s, const std::string& choices);

// Copies a small device tensor to the host. The stream continues meanwhile; the host waits only
// when it calls wait().
class HostRead {
 public:
  HostRead(Stream& s, const Tensor& x);  // x is f64
  ~HostRead();
  HostRead(HostRead&&) noexcept;
  HostRead& operator=(HostRead&&) noexcept;
  std::span<const double> wait();
  bool ready() const;  // wait() would return at once

  struct Impl {  // implemented by the backend
    virtual ~Impl() = default;
    virtual std::span<const double> wait() = 0;
    virtual bool ready() const = 0;
  };

 private:
  std::unique_ptr<Impl> impl_;
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

std::unique_ptr<HostRead::Impl> start_host_read(Stream& s, const Tensor& x);
// Choices made by timing, see gemm_tuner.h.
void add_choices(Stream& s, const std::string& known);
std::string end_tuning(Stream& s, bool remember);
}  // namespace cuda

}  // namespace sbtrain::ops
