// Filling, copying and adding; the way to the device and back.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "ops/op.h"

namespace sbtrain::ops {

struct Fill {
  static constexpr std::string_view kName = "fill";
  Tensor x;
  float value;
  void check() const {}
};

// y = x, same shape; types may differ.
struct Copy {
  static constexpr std::string_view kName = "copy";
  Tensor y;
  Tensor x;
  void check() const { Check(kName).matrix("x", x, y.rows(), y.cols(), x.dtype); }
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
};

// y contiguous, y.bytes() bytes; `host` may be used again at once.
struct CopyFromHost {
  static constexpr std::string_view kName = "copy_from_host";
  Tensor y;
  const void* host;
  void check() const { Check(kName).flat("y", y, y.numel(), y.dtype); }
};

// Waits until the bytes are there.
struct CopyToHost {
  static constexpr std::string_view kName = "copy_to_host";
  void* host;
  Tensor x;
  void check() const { Check(kName).flat("x", x, x.numel(), x.dtype); }
};

// Waits until everything on the stream is done.
struct Synchronize {
  static constexpr std::string_view kName = "synchronize";
  void check() const {}
};

// Between these two, ops that have alternatives time them and keep the fastest; what they write is
// undefined. `known` are choices of an earlier run on such a device, which are kept; end_tuning()
// returns all that are known now ("" on backends without alternatives).
void begin_tuning(Stream& s, const std::string& known);
std::string end_tuning(Stream& s);

// A copy of a small device tensor on its way to the host: the stream goes on, the host waits only
// when it asks.
class HostRead {
 public:
  HostRead(Stream& s, const Tensor& x);  // f64
  ~HostRead();
  HostRead(HostRead&&) noexcept;
  HostRead& operator=(HostRead&&) noexcept;
  std::span<const double> wait();

  struct Impl {  // of the backend
    virtual ~Impl() = default;
    virtual std::span<const double> wait() = 0;
  };

 private:
  std::unique_ptr<Impl> impl_;
};

namespace cpu {
void run(Cpu, Stream& s, const Fill& op);
void run(Cpu, Stream& s, const Copy& op);
void run(Cpu, Stream& s, const Add& op);
void run(Cpu, Stream& s, const CopyFromHost& op);
void run(Cpu, Stream& s, const CopyToHost& op);
void run(Cpu, Stream& s, const Synchronize& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const Fill& op);
void run(Cuda, Stream& s, const Copy& op);
void run(Cuda, Stream& s, const Add& op);
void run(Cuda, Stream& s, const CopyFromHost& op);
void run(Cuda, Stream& s, const CopyToHost& op);
void run(Cuda, Stream& s, const Synchronize& op);

std::unique_ptr<HostRead::Impl> start_host_read(Stream& s, const Tensor& x);
// Choices made by timing, see gemm_tuner.h.
void add_choices(Stream& s, const std::string& known);
std::string keep_choices(Stream& s);
}  // namespace cuda

}  // namespace sbtrain::ops
