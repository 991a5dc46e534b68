#include "ops/stream_control.h"

#include <algorithm>

#include "core/build_options.h"
#include "core/error.h"

namespace sbtrain::ops {
namespace {

struct Copied : HostRead {
  explicit Copied(const Tensor& x) : values(static_cast<size_t>(x.numel())) {
    if (x.data) std::copy_n(x.f64(), values.size(), values.begin());
  }
  std::span<const double> wait() override { return values; }
  bool ready() const override { return true; }
  std::vector<double> values;
};

}  // namespace

std::unique_ptr<HostRead> StreamControl::read(const Tensor& x) {
  return std::make_unique<Copied>(x);
}

void StreamControl::trace(const std::vector<Traced>& /*streams*/) {
  fail(ExitCode::kInternal, "a trace of a stream that is not on a GPU");
}

StreamControl& control(Stream& s) {
#if SBTRAIN_HAS_CUDA
  if (s.backend() == Backend::kCuda) return cuda::control(s);
#endif
  if (!s.context()) s.set_context(std::make_unique<StreamControl>());
  return static_cast<StreamControl&>(*s.context());
}

void begin_tuning(Stream& s, const std::string& known) {
  s.set_tuning(true);
  control(s).set_choices(known);
}

std::string end_tuning(Stream& s, bool remember) {
  s.set_tuning(false);
  return control(s).choices(remember);
}

WorkTimer::WorkTimer(Stream& s, std::string_view name)
    : stream_(s), name_(name), profile_(s.profile()) {
  if (!profile_) return;
  mark_ = control(s).begin_mark(name);
  begin_ = Clock::now();
}

WorkTimer::~WorkTimer() {
  if (mark_ >= 0) {
    control(stream_).end_mark(mark_);
  } else if (profile_) {
    profile_->add(name_, std::chrono::duration<double>(Clock::now() - begin_).count());
  }
}

void await(Stream& s, const Event& event, std::string_view name) {
  timed(s, name, [&] { s.wait(event); });
}

}  // namespace sbtrain::ops
