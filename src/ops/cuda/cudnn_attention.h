// Softmax attention by cuDNN. Loaded when it is first asked for, so that a build runs without it.
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

  // Null, and `why`, where this build, this machine or this version of cuDNN cannot.
  static std::unique_ptr<CudnnAttention> open(const Options& options, std::string* why);

  virtual ~CudnnAttention() = default;

  // Do what kernels::softmax_forward and softmax_backward do, lse included, and return an empty
  // string; or do nothing, and return why. A failure on the way throws.
  virtual std::string forward(cudaStream_t stream, const kernels::SoftmaxProblem& problem,
                              Workspace workspace) = 0;
  virtual std::string backward(cudaStream_t stream, const kernels::SoftmaxProblem& problem,
                               Workspace workspace) = 0;

  // What the plan for this problem takes of the workspace; 0 where there is none.
  virtual size_t forward_bytes(const kernels::SoftmaxProblem& problem) = 0;
  virtual size_t backward_bytes(const kernels::SoftmaxProblem& problem) = 0;

  virtual std::string version() const = 0;  // "9.19.0"
};

}  // namespace sbtrain::ops::cuda
