// The turns of one row's frequencies, for the kernels that rotate.
#pragma once

#include <cstdint>

#include "kernels/rope.h"

namespace sbtrain::kernels {

// kByLength: whether rows have frequencies of their own, Rope::lengths; a thread reads its row's
// length once.
template <bool kByLength>
class RowTurns {
 public:
  __device__ RowTurns(const Rope& p, int64_t row) : p_(p) {
    if constexpr (kByLength) {
      const double d = p.rotated;
      const double length = p.lengths[row];
      base_ = p.base;
      if (length > p.train_length) {
        base_ *= pow(p.factor * (length / p.train_length) - (p.factor - 1.0), d / (d - 2.0));
      }
    }
  }
  // Of frequency i.
  __device__ double operator[](int i) const {
    if constexpr (kByLength) {
      constexpr double kTwoPi = 6.283185307179586476925286766559;
      return pow(base_, -2.0 * i / p_.rotated) / kTwoPi;
    } else {
      return p_.turns[i];
    }
  }

 private:
  const Rope& p_;
  double base_ = 0;
};

}  // namespace sbtrain::kernels
