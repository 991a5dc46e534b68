// RMSNorm, LayerNorm, and their forms for heads, of rows of `cols` or of `heads` x `head_dim`
// channels; ops/norm.h has the formulas, for members of the same names. Activations, their
// gradients and weights are bf16, gradients of weights f32. Statistics are f32 and recomputed from
// x. Source: norm.cu.
#pragma once

#include "kernels/limits.h"
#include "kernels/types.h"

namespace sbtrain::kernels {

struct RmsNorm {
  Matrix<bf16> y;
  Matrix<const bf16> x;
  const bf16* w;
  int64_t rows, cols;
  float eps;
  float* amax = nullptr;  // of y, if wanted
  bool early = false;  // begins before the kernel in front of it has ended (dependent_launch.cuh)
};
struct RmsNormBackward {
  Matrix<bf16> dx;
  float* dw;
  Matrix<const bf16> dy, x;
  const bf16* w;
  int64_t rows, cols;
  float eps;
  bool accumulate_dw;
  float* amax = nullptr;     // of dx, if wanted
  float* scratch = nullptr;  // [kTokenParts, cols]
  bool early = false;        // of the two kernels, the second begins early (dependent_launch.cuh)
};
struct LayerNorm {
  Matrix<bf16> y;
  Matrix<const bf16> x;
  const bf16 *w, *b;
  int64_t rows, cols;
  float eps;
};
struct LayerNormBackward {
  Matrix<bf16> dx;  // may be dy
  float *dw, *db;
  Matrix<const bf16> dy, x;
  const bf16* w;
  int64_t rows, cols;
  float eps;
  bool accumulate;
  float* scratch = nullptr;  // [kTokenParts, 2 * cols]
};
struct HeadNorm {
  Matrix<bf16> y;
  Matrix<const bf16> x;
  const bf16 *w, *b;  // [heads * head_dim]
  int64_t rows;
  int heads, head_dim;
  float eps;
};
struct HeadNormBackward {
  Matrix<bf16> dx;
  float *dw, *db;
  Matrix<const bf16> dy, x;
  const bf16* w;
  int64_t rows;
  int heads, head_dim;
  float eps;
  float* scratch = nullptr;  // [kTokenParts, 2 * heads * head_dim]
};
// One head may be as wide as a row of RmsNorm, several as wide as those of HeadNorm.
struct HeadRmsNorm {
  Matrix<bf16> y;
  Matrix<const bf16> x;
  const bf16* w;  // [head_dim]
  int64_t rows;
  int heads, head_dim;
  float eps;
};
struct HeadRmsNormBackward {
  Matrix<bf16> dx;  // may be dy
  float* dw;
  Matrix<const bf16> dy, x;
  const bf16* w;
  int64_t rows;
  int heads, head_dim;
  float eps;
  float* scratch = nullptr;  // [kTokenParts, head_dim]
};
void launch(cudaStream_t stream, const RmsNorm& p);
void launch(cudaStream_t stream, const RmsNormBackward& p);
void launch(cudaStream_t stream, const LayerNorm& p);
void launch(cudaStream_t stream, const LayerNormBackward& p);
void launch(cudaStream_t stream, const HeadNorm& p);
void launch(cudaStream_t stream, const HeadNormBackward& p);
void launch(cudaStream_t stream, const HeadRmsNorm& p);
void launch(cudaStream_t stream, const HeadRmsNormBackward& p);

}  // namespace sbtrain::kernels
