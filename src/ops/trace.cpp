#include "ops/trace.h"

#include "core/device.h"
#include "core/error.h"

namespace sbtrain::ops {

void trace(const std::vector<Traced>& streams) {
  for (const Traced& each : streams) {
    require(each.stream->backend() == Backend::kCuda && each.stream->profile(),
            "a trace of a stream that is not on a GPU, or has no profile");
  }
  if constexpr (kHasCuda) cuda::trace(streams);
}

}  // namespace sbtrain::ops
