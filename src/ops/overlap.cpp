#include "ops/overlap.h"

#include "core/build_options.h"
#include "ops/op.h"

namespace sbtrain::ops {

void set_overlap(Stream& s, bool on) {
#if SBTRAIN_HAS_CUDA
  if (s.backend() == Backend::kCuda) cuda::set_overlap(s, on);
#endif
}

}  // namespace sbtrain::ops
