// Activations, biases and their gradients, of `cols` columns of rows; ops/activation.h and
// ops/linear.h have the formulas, for members of the same names. Matrices and weights are bf16
// unless they say otherwise. Source: activation.cu.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

struct Swiglu {
  Matrix<bf16> y;
  Matrix<const bf16> gate_up;  // [rows, 2 * cols]
  int64_t rows, cols;
  float* amax = nullptr;  // of y, if wanted
  bool early = false;  // begins before the kernel in front of it has ended (dependent_launch.cuh)
};
struct SwigluBackward {
  Matrix<bf16> dgate_up;  // [rows, 2 * cols], may be gate_up itself
  Matrix<const bf16> dy, gate_up;
  int64_t rows, cols;
  float* amax = nullptr;  // of dgate_up, if wanted
};
struct BiasSigmoid {
  Matrix<float> y;  // may be x
  Matrix<const float> x;
  const bf16* b;
  int64_t rows, cols;
};
struct SigmoidBackward {
  Matrix<bf16> dx;  // may be dy
  Matrix<const bf16> dy;
  Matrix<const float> y;
  int64_t rows, cols;
};
struct BiasGelu {
  Matrix<bf16> y;  // may be x
  Matrix<const bf16> x;
  const bf16* b;
  int64_t rows, cols;
  bool tanh_form;
};
struct BiasGeluBackward {
  Matrix<bf16> dx;  // may be dy or x
  Matrix<const bf16> dy, x;
  const bf16* b;
  int64_t rows, cols;
  bool tanh_form;
};
struct AddBias {
  Matrix<bf16> y;
  const bf16* b;
  int64_t rows, cols;
};
struct BiasBackward {
  float* db;
  Matrix<const bf16> dy;
  int64_t rows, cols;
  float* scratch = nullptr;  // [kTokenParts, cols]
};
void launch(cudaStream_t stream, const Swiglu& p);
void launch(cudaStream_t stream, const SwigluBackward& p);
void launch(cudaStream_t stream, const BiasSigmoid& p);
void launch(cudaStream_t stream, const SigmoidBackward& p);
void launch(cudaStream_t stream, const BiasGelu& p);
void launch(cudaStream_t stream, const BiasGeluBackward& p);
void launch(cudaStream_t stream, const AddBias& p);
void launch(cudaStream_t stream, const BiasBackward& p);

}  // namespace sbtrain::kernels
