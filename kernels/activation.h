// Activations and their gradients. Matrices are bf16 unless stated otherwise; strides are elements
// from row to row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/types.h"

namespace sbtrain::kernels {

// y [rows, cols] = silu(gate) * up, gate_up [rows, 2 * cols]: gate left, up right
// (SwiGLU, arXiv 2002.05202). Source: activation.cu.
struct Swiglu {
  Matrix<__nv_bfloat16> y;
  Matrix<const __nv_bfloat16> gate_up;
  int64_t rows, cols;
  bool early = false;  // begins before the kernel in front of it has ended (dependent_launch.cuh)
};
void swiglu(cudaStream_t stream, const Swiglu& p);

// dgate_up [rows, 2 * cols] = gradient; dgate_up may be gate_up itself.
struct SwigluBackward {
  Matrix<__nv_bfloat16> dgate_up;
  Matrix<const __nv_bfloat16> dy;
  Matrix<const __nv_bfloat16> gate_up;
  int64_t rows, cols;
};
void swiglu_backward(cudaStream_t stream, const SwigluBackward& p);

// y [rows, cols] = sigmoid(x + b), b [cols] bf16. y may be x. Both are f32: near 1, where most
// gates are, bf16 would be too coarse to represent 1 - y.
struct BiasSigmoid {
  Matrix<float> y;
  Matrix<const float> x;
  const __nv_bfloat16* b;
  int64_t rows, cols;
};
void bias_sigmoid(cudaStream_t stream, const BiasSigmoid& p);

// dx [rows, cols] = dy * y * (1 - y), y f32. dx may be dy.
struct SigmoidBackward {
  Matrix<__nv_bfloat16> dx;
  Matrix<const __nv_bfloat16> dy;
  Matrix<const float> y;
  int64_t rows, cols;
};
void sigmoid_backward(cudaStream_t stream, const SigmoidBackward& p);

// y [rows, cols] += b [cols], both bf16.
struct AddBias {
  Matrix<__nv_bfloat16> y;
  const __nv_bfloat16* b;
  int64_t rows, cols;
};
void add_bias(cudaStream_t stream, const AddBias& p);

// y [rows, cols] = gelu(x + b), gelu(z) = z Phi(z) (arXiv 1606.08415). y may be x.
struct BiasGelu {
  Matrix<__nv_bfloat16> y;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* b;
  int64_t rows, cols;
};
void bias_gelu(cudaStream_t stream, const BiasGelu& p);

// dx [rows, cols] = dy gelu'(x + b). dx may be dy or x.
struct BiasGeluBackward {
  Matrix<__nv_bfloat16> dx;
  Matrix<const __nv_bfloat16> dy;
  Matrix<const __nv_bfloat16> x;
  const __nv_bfloat16* b;
  int64_t rows, cols;
};
void bias_gelu_backward(cudaStream_t stream, const BiasGeluBackward& p);

// db [cols] f32 += column sums of dy [rows, cols] bf16, in a fixed order.
struct BiasBackward {
  float* db;
  Matrix<const __nv_bfloat16> dy;
  int64_t rows, cols;
  float* scratch;  // [kTokenParts, cols]
};
void bias_backward(cudaStream_t stream, const BiasBackward& p);

}  // namespace sbtrain::kernels
