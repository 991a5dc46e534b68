// Kernels that begin before the one in front of them has ended.
#pragma once

#include "core/stream.h"

namespace sbtrain::ops {

// On a GPU, from now on kernels that are recorded (core/graph.h) may begin before the one in front
// of them has ended (kernels/primitives/dependent_launch.cuh), which changes no result. Off at
// first.
void set_overlap(Stream& s, bool on);

namespace cuda {
void set_overlap(Stream& s, bool on);
}  // namespace cuda

}  // namespace sbtrain::ops
