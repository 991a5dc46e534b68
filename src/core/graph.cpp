#include "core/graph.h"

#include "core/build_options.h"
#include "core/device.h"

#if SBTRAIN_HAS_CUDA
#include <memory>

#include "core/cuda_check.h"
#endif

namespace sbtrain {

#if SBTRAIN_HAS_CUDA

namespace {

struct GraphDeleter {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};
using Graph = std::unique_ptr<CUgraph_st, GraphDeleter>;

// What `work` gives the queue, which does not run.
Graph capture(cudaStream_t queue, const std::function<void()>& work) {
  // Other threads, and allocations by libraries, go on as ever.
  check_cuda(cudaStreamBeginCapture(queue, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(queue, &graph);
    cudaGetLastError();
    if (graph) cudaGraphDestroy(graph);
    throw;
  }
  check_cuda(cudaStreamEndCapture(queue, &graph), "cudaStreamEndCapture");
  return Graph(graph);
}

}  // namespace

CapturedGraph::~CapturedGraph() {
  if (records_.empty()) return;
  cudaStreamSynchronize(stream_.queue());
  for (const auto& [key, executable] : records_) {
    if (executable) cudaGraphExecDestroy(executable);
  }
}

CUgraphExec_st* CapturedGraph::record(const std::function<void()>& work) {
  const Graph graph = capture(stream_.queue(), work);
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaGraphInstantiate(&executable, graph.get(), 0), "cudaGraphInstantiate");
  return executable;
}

void CapturedGraph::run(std::string_view name, int64_t variant, const std::function<void()>& work) {
  if (stream_.backend() != Backend::kCuda || stream_.tuning() || stream_.profile()) return work();
  const Key key(name, variant);
  const auto found = records_.find(key);
  if (found == records_.end()) {
    if (records_.size() < kMostRecords) records_.emplace(key, nullptr);
    return work();
  }
  if (!found->second) found->second = record(work);
  check_cuda(cudaGraphLaunch(found->second, stream_.queue()), "cudaGraphLaunch");
}

#else

CapturedGraph::~CapturedGraph() = default;

void CapturedGraph::run(std::string_view, int64_t, const std::function<void()>& work) {
  work();
}

#endif

}  // namespace sbtrain
