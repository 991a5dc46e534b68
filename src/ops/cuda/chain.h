// Ops that wait to be given to one kernel (ops/chain.h).
#pragma once

#include <vector>

#include "kernels/chain.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {

// Collects links, in the order of the stream: whatever else it is given comes after them, because
// cuda_stream() launches them first.
class Chain : public BackendContext {
 public:
  explicit Chain(Context& c) : context_(c) {}
  // Whether it is collected; otherwise the caller launches the link.
  bool add(const kernels::ChainLink& link);
  void launch();

 private:
  Context& context_;
  std::vector<kernels::ChainLink> links_;
};

// Launches the kernel of a link, now or as part of a chain.
void launch(const Stream& s, const kernels::ChainLink& link);

}  // namespace sbtrain::ops::cuda
