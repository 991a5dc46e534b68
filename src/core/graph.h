// Work that a stream is given again and again, recorded once as a CUDA graph.
//
// Where the kernels of a step are short, giving each of them to the GPU takes longer than they run.
// A graph of all of them is given at once.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "core/stream.h"

struct CUgraphExec_st;

namespace sbtrain {

class CapturedGraph {
 public:
  explicit CapturedGraph(Stream& s) : stream_(s) {}
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Gives the stream what `work` gives it. On a GPU, `work` is called for the first two times with
  // a name and variant: the first call is plain, so that libraries make what they keep; what the
  // second gives the stream is recorded. From then on the record runs, and `work` is not called.
  //
  // So all calls with a name and variant must do the same: the same ops on the same memory, which
  // is persistent or that of an adopted plan (Memory::adopt_plan), with the same numbers from the
  // host. `work` neither waits for the device nor for events from outside, and uses this stream
  // alone.
  //
  // On other backends, and while the stream tunes or has a profile, `work` is called each time; so
  // it is from variant kMostRecords on, because each record takes memory of the device.
  void run(std::string_view name, int64_t variant, const std::function<void()>& work);

  static constexpr size_t kMostRecords = 64;

 private:
  using Key = std::pair<std::string, int64_t>;
  CUgraphExec_st* record(const std::function<void()>& work);

  Stream& stream_;
  std::map<Key, CUgraphExec_st*> records_;  // null after the first, plain call
};

}  // namespace sbtrain
