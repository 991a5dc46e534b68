// What lies behind ops::HostRead.
#pragma once

#include <memory>

#include "ops/ops.h"

namespace sbtrain::ops {

struct HostRead::Impl {
  virtual ~Impl() = default;
  virtual std::span<const double> wait() = 0;
};

namespace cuda {
std::unique_ptr<HostRead::Impl> start_host_read(Stream& s, const Tensor& x);
}

}  // namespace sbtrain::ops
