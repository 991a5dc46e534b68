#include "ops/cuda/chain.h"

#include "ops/chain.h"

namespace sbtrain::ops::cuda {
namespace {

// Fewer links are faster by kernels of their own: this one takes some microseconds to begin.
constexpr size_t kFewestLinks = 8;

void launch_alone(cudaStream_t stream, const kernels::ChainLink& link) {
  if (const auto* product = std::get_if<kernels::FewRows>(&link)) {
    kernels::few_rows(stream, *product);
  } else if (const auto* stick = std::get_if<kernels::StickBreakingDecode>(&link)) {
    kernels::stickbreaking_decode(stream, *stick);
  } else if (const auto* softmax = std::get_if<kernels::SoftmaxDecode>(&link)) {
    kernels::softmax_decode(stream, *softmax);
  } else {
    kernels::rope(stream, std::get<kernels::Rope>(link));
  }
}

}  // namespace

bool Chain::add(const kernels::ChainLink& link) {
  if (!kernels::chain_takes(link)) return false;
  links_.push_back(link);
  return true;
}

void Chain::launch() {
  if (links_.size() >= kFewestLinks) {
    kernels::chain(context_.stream, links_, context_.chain_count());
  } else {
    for (const kernels::ChainLink& link : links_) launch_alone(context_.stream, link);
  }
  links_.clear();
}

void launch_chain(BackendContext& chain) {
  static_cast<Chain&>(chain).launch();
}

void launch(const Stream& s, const kernels::ChainLink& link) {
  const Context& c = context(s);
  if (c.chain && static_cast<Chain&>(*c.chain).add(link)) return;
  launch_alone(cuda_stream(s), link);
}

void run_chained(Stream& s, const std::function<void()>& work) {
  Context& c = context(s);
  if (!begins_early(s) || !kernels::chain_runs()) return work();
  // Whatever happens to `work`, the ops after it are not collected.
  struct End {
    Context& context;
    ~End() { context.chain.reset(); }
  } const end{c};
  c.chain = std::make_unique<Chain>(c);
  work();
  launch_chain(*c.chain);
}

}  // namespace sbtrain::ops::cuda
