#include "ops/sampling.h"

namespace sbtrain::ops {

void set_overlap(Stream& s, bool on, bool prefetch) {
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) cuda::set_overlap(s, on, prefetch);
  }
}

}  // namespace sbtrain::ops
