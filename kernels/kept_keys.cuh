// How kernels find a page (kept_keys.h).
#pragma once

#include "kernels/kept_keys.h"

namespace sbtrain::kernels {

// The page of row i of a head.
__device__ __forceinline__ void* page_of(const int64_t* of_head, int i) {
  return reinterpret_cast<void*>(
      __ldg(reinterpret_cast<const long long*>(of_head) + i / kPageKeys));
}

}  // namespace sbtrain::kernels
