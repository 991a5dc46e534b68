#include "ops/trace.h"

#include "core/build_options.h"
#include "core/error.h"

namespace sbtrain::ops {

void trace(const std::vector<Traced>& streams) {
  for (const Traced& each : streams) {
    require(each.stream->backend() == Backend::kCuda && each.stream->profile(),
            "a trace of a stream that is not on a GPU, or has no profile");
  }
#if SBTRAIN_HAS_CUDA
  cuda::trace(streams);
#endif
}

}  // namespace sbtrain::ops
