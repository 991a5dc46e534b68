// Softmax attention by cuDNN. The library is loaded on first use, so that a build runs without it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "core/tensor.h"
#include "kernels/attention/softmax.h"

namespace sbtrain::ops::cuda {

class CudnnAttention {
 public:
  // Returns null and sets `why` if this build, machine or version of cuDNN does not support it.
  // `deterministic` concerns the backward pass.
  static std::unique_ptr<CudnnAttention> open(bool deterministic, std::string* why);

  virtual ~CudnnAttention() = default;

  // Computes what kernels::softmax_forward or softmax_backward computes, lse included, and returns
  // an empty string; or does nothing, and returns the reason. A failure during execution throws.
  // ops/choose.h says how many bytes of workspace are enough; it is aligned to 256 bytes.
  virtual std::string run(cudaStream_t stream, const kernels::SoftmaxProblem& problem,
                          const Tensor& workspace, bool backward) = 0;

  // The bytes of workspace that the plan for this problem takes; 0 if there is no plan.
  virtual size_t bytes(const kernels::SoftmaxProblem& problem, bool backward) = 0;

  virtual std::string version() const = 0;  // "9.19.0"
};

}  // namespace sbtrain::ops::cuda
