// Initial values of parameters, drawn where the parameters are.
#pragma once

#include "core/philox.h"
#include "core/weights.h"
#include "kernels/initialize.h"
#include "ops/op.h"

namespace sbtrain::ops {

// x_N = storage elements [begin, begin + N) of a parameter at its start. Storage element e stands
// for the logical element r * cols + c, where r = e / stored_cols < rows and c = e % stored_cols <
// cols; any other is padding and becomes zero. The value is init's constant, or its standard
// deviation times the normal number that `random` has for the logical element. So it does not
// depend on which range of the parameter is filled, and it has the same bits on every backend.
struct Initialize {
  static constexpr std::string_view kName = "initialize";
  Tensor x_N;  // f32; bf16 too on a GPU, rounded from the f32 value
  int64_t begin;
  int64_t rows, cols;   // logical
  int64_t stored_cols;  // at least cols
  Init init;
  Philox random;
  void check() const {
    Check(kName).flat("x", x_N, x_N.numel());
    Check(kName).that(begin >= 0 && cols > 0 && cols <= stored_cols, "no such rows");
  }
  kernels::Initialize kernel() const {
    const bool normal = init.kind == Init::Kind::kNormal;
    return {x_N.data, x_N.dtype,   begin,  x_N.numel(), rows,
            cols,     stored_cols, normal, init.value,  random.stream()};
  }
};

namespace cpu {
void run(Cpu, Stream& s, const Initialize& op);
}  // namespace cpu

}  // namespace sbtrain::ops
