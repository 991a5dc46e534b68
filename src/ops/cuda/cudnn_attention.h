// Softmax attention by cuDNN. The library is loaded on first use, so that a build runs without it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "kernels/attention/softmax.h"

namespace sbtrain::ops::cuda {

class CudnnAttention {
 public:
  struct Workspace {
    void* data = nullptr;  // aligned to 256 bytes
    size_t bytes = 0;      // ops/choose.h says how many are enough
  };
  struct Options {
    bool deterministic = true;  // the backward pass
  };

  // Returns null and sets `why` if this build, machine or version of cuDNN does not support it.
  static std::unique_ptr<CudnnAttention> open(const Options& options, std::string* why);

  virtual ~CudnnAttention() = default;

  // Compute what kernels::softmax_forward and softmax_backward compute, lse included, and return an
  // empty string; or do nothing, and return the reason. A failure during execution throws.
  virtual std::string forward(cudaStream_t stream, const kernels::SoftmaxProblem& problem,
                              Workspace workspace) = 0;
  virtual std::string backward(cudaStream_t stream, const kernels::SoftmaxProblem& problem,
                               Workspace workspace) = 0;

  // The bytes of workspace that the plan for this problem takes; 0 if there is no plan.
  virtual size_t forward_bytes(const kernels::SoftmaxProblem& problem) = 0;
  virtual size_t backward_bytes(const kernels::SoftmaxProblem& problem) = 0;

  virtual std::string version() const = 0;  // "9.19.0"
};

}  // namespace sbtrain::ops::cuda
