#include "ops/host_read.h"

#include <algorithm>
#include <vector>

#include "core/device.h"
#include "ops/check.h"

namespace sbtrain::ops {
namespace {

// Where ops are done when they return.
struct Immediate : HostRead::Impl {
  explicit Immediate(const Tensor& x) : values(static_cast<size_t>(x.numel())) {
    if (x.data) std::copy_n(x.f64(), values.size(), values.begin());
  }
  std::span<const double> wait() override { return values; }
  std::vector<double> values;
};

std::unique_ptr<HostRead::Impl> start(Stream& s, const Tensor& x) {
  check_flat("host_read", "x", x, DType::kF64, x.numel());
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) return cuda::start_host_read(s, x);
  }
  return std::make_unique<Immediate>(x);
}

}  // namespace

HostRead::HostRead(Stream& s, Tensor x) : impl_(start(s, x)) {}
HostRead::~HostRead() = default;
HostRead::HostRead(HostRead&&) noexcept = default;
HostRead& HostRead::operator=(HostRead&&) noexcept = default;

std::span<const double> HostRead::wait() {
  return impl_->wait();
}

}  // namespace sbtrain::ops
