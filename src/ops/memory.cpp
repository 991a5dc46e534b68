#include "ops/memory.h"

#include <algorithm>
#include <vector>

#include "core/build_options.h"
#include "ops/timed.h"

namespace sbtrain::ops {
namespace {

// For backends whose ops are complete when they return.
struct Immediate : HostRead::Impl {
  explicit Immediate(const Tensor& x) : values(static_cast<size_t>(x.numel())) {
    if (x.data) std::copy_n(x.f64(), values.size(), values.begin());
  }
  std::span<const double> wait() override { return values; }
  bool ready() const override { return true; }
  std::vector<double> values;
};

std::unique_ptr<HostRead::Impl> start(Stream& s, const Tensor& x) {
  Check("host_read").flat("x", x, x.numel(), DType::kF64);
#if SBTRAIN_HAS_CUDA
  if (s.backend() == Backend::kCuda) return cuda::start_host_read(s, x);
#endif
  return std::make_unique<Immediate>(x);
}

}  // namespace

void await(Stream& s, const Event& event) {
  timed(s, "await", [&] { s.wait(event); });
}

void begin_tuning(Stream& s, const std::string& known) {
  s.set_tuning(true);
  set_choices(s, known);
}

std::string end_tuning(Stream& s, [[maybe_unused]] bool remember) {
  s.set_tuning(false);
#if SBTRAIN_HAS_CUDA
  if (s.backend() == Backend::kCuda) return cuda::end_tuning(s, remember);
#endif
  return {};
}

void set_choices([[maybe_unused]] Stream& s, [[maybe_unused]] const std::string& choices) {
#if SBTRAIN_HAS_CUDA
  if (s.backend() == Backend::kCuda) cuda::add_choices(s, choices);
#endif
}

HostRead::HostRead(Stream& s, const Tensor& x) : impl_(start(s, x)) {}
HostRead::~HostRead() = default;
HostRead::HostRead(HostRead&&) noexcept = default;
HostRead& HostRead::operator=(HostRead&&) noexcept = default;

std::span<const double> HostRead::wait() {
  return impl_->wait();
}

bool HostRead::ready() const {
  return impl_->ready();
}

}  // namespace sbtrain::ops
