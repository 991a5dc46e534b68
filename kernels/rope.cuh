// The rotation of two channels, which the kernels that rotate share, so that they have the same
// bits.
#pragma once

#include <cmath>

#include "kernels/rope.h"

namespace sbtrain::kernels {

struct RopeAngle {
  float sine, cosine;
};
// `turns` is a frequency divided by 2 pi.
__device__ __forceinline__ RopeAngle rope_angle(double position, double turns) {
  const double all = position * turns;
  RopeAngle angle;
  sincospif(2.0f * static_cast<float>(all - rint(all)), &angle.sine, &angle.cosine);
  return angle;
}

// The calls of fmaf() say which product is rounded.
__device__ __forceinline__ void rotate(const RopeAngle& angle, float& x1, float& x2) {
  const float left = x1;
  const float right = x2;
  x1 = fmaf(left, angle.cosine, -(right * angle.sine));
  x2 = fmaf(right, angle.cosine, left * angle.sine);
}

}  // namespace sbtrain::kernels
