#include "ops/overlap.h"

#include "ops/op.h"

namespace sbtrain::ops {

void set_overlap(Stream& s, bool on) {
  if constexpr (kHasCuda) {
    if (s.backend() == Backend::kCuda) cuda::set_overlap(s, on);
  }
}

}  // namespace sbtrain::ops
