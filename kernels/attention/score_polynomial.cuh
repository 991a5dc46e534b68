// The weights of Based (arXiv 2402.18668) and ReBased (arXiv 2402.10644): a polynomial of the
// product, and its derivative.
#pragma once

#include "kernels/attention/rebased.h"

namespace sbtrain::kernels {

struct PolynomialScore {
  RebasedPolynomial s;
  __device__ __forceinline__ float weight(float x) const {
    return s.constant + x * (s.linear + x * s.square);
  }
  __device__ __forceinline__ float slope(float x) const { return s.linear + 2.0f * x * s.square; }
};

}  // namespace sbtrain::kernels
