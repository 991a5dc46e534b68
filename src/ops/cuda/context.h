// What the CUDA backend keeps for a stream, and the error checks of its launchers.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/cuda_check.h"
#include "ops/cuda/cublas_lt.h"
#include "ops/cuda/gemm_tuner.h"
#include "ops/op.h"
#include "ops/stream_control.h"

namespace sbtrain::ops::cuda {

// Throws ExitCode::kInternal naming the call, as SBTRAIN_CUDA_CHECK does for CUDA's runtime.
void check_cublas(cublasStatus_t status, const char* call);
#define SBTRAIN_CUBLAS_CHECK(call) ::sbtrain::ops::cuda::check_cublas((call), #call)

// Pinned host memory through which host data reaches the device: the caller's memory may be
// reused at once, and the host waits for the stream only while no slot is free.
class Staging {
 public:
  ~Staging();
  void upload(cudaStream_t stream, void* device, const void* host, size_t bytes);
  void download(cudaStream_t stream, void* host, const void* device, size_t bytes);

 private:
  static constexpr size_t kSlotBytes = size_t{8} << 20;
  struct Slot {
    void* host = nullptr;
    cudaEvent_t free = nullptr;
  };
  Slot& next_slot();  // waits until the device no longer uses it
  std::array<Slot, 4> slots_;
  size_t next_ = 0;
};

class Context : public StreamControl {
 public:
  explicit Context(cudaStream_t queue);
  ~Context() override;

  void check_after_waits(std::function<void()> check) override;
  void set_overlap(bool on) override { overlap = on; }
  std::unique_ptr<HostRead> read(const Tensor& x) override;
  void set_choices(const std::string& choices) override { tuner.add(choices); }
  std::string choices(bool remember) override;
  int begin_mark(std::string_view op) override;
  void end_mark(int mark) override;
  void trace(const std::vector<Traced>& streams) override;

  cudaStream_t stream = nullptr;  // the stream's own
  cublasLtHandle_t blas = nullptr;
  cudaDeviceProp device{};
  Staging staging;
  GemmTuner tuner;
  std::unique_ptr<BackendContext> attention;  // plans of cuDNN, see softmax.cpp

  // What has been logged of softmax attention, which is not said again in every step: the op,
  // heads, their channels, whether in a window, and why it is not on cuDNN.
  std::set<std::tuple<std::string_view, int, int, bool, std::string>> said;

  // Called once the host has waited for the stream.
  std::function<void()> after_wait = [] {};

  // Pinned memory for HostRead that no read is using.
  static constexpr size_t kReadValues = 16;
  struct ReadSlot {
    double* values = nullptr;
    cudaEvent_t done = nullptr;
  };
  std::vector<ReadSlot> reads;

  // decode_blocks() zeros on the device, with which blocks of a kernel see that all have come; a
  // kernel leaves zeros.
  int32_t* counters();

  // Whether kernels may begin before the one in front of them has ended.
  bool overlap = false;

  // Marks of timed ops.
  struct Mark {
    std::string op;
    cudaEvent_t begin, end;
  };
  std::vector<Mark> marks;
  size_t marks_used = 0;

  // Of trace(): where the next Synchronize adds the marks, null for nowhere, and the event
  // that all times are counted from.
  std::vector<TracedOp>* traced = nullptr;
  std::shared_ptr<CUevent_st> trace_begin;

 private:
  int32_t* counters_ = nullptr;

  friend class Beside;                              // of run_both()
  cudaStream_t beside_ = nullptr;                   // made when it is needed
  cudaEvent_t forked_ = nullptr, joins_ = nullptr;  // the same
};

// The stream's context, created at the first call.
Context& context(const Stream& s);

// Whether the stream is being recorded (core/graph.h).
bool is_recorded(const Stream& s);

// Calls both with a workspace of their own. If there is a `second` workspace and the stream is
// recorded, the work of the two runs at the same time: neither may write what the other one reads
// or writes. Otherwise both get `workspace`, one after the other.
using Work = std::function<void(const Buffer& workspace)>;
void run_both(Stream& s, const Buffer& workspace, const Buffer& second, const Work& first,
              const Work& other);

// The product, with the algorithm that is chosen for its shape. `workspace` is linear_workspace().
void gemm(Stream& s, const Gemm& g, const Tensor& workspace);

}  // namespace sbtrain::ops::cuda
