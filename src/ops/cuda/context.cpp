#include "ops/cuda/context.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/log.h"
#include "kernels/scratch_sizes.h"
#include "ops/memory.h"

namespace sbtrain::ops::cuda {

void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail(ExitCode::kInternal, "cuBLASLt: {} failed: {}", call, cublas_lt().GetStatusString(status));
}

// ---- Staging --------------------------------------------------------------------------------

Staging::~Staging() {
  for (const Slot& slot : slots_) {
    if (!slot.host) continue;
    cudaEventSynchronize(slot.free);
    cudaEventDestroy(slot.free);
    cudaFreeHost(slot.host);
  }
}

Staging::Slot& Staging::next_slot() {
  Slot& slot = slots_[next_++ % slots_.size()];
  if (!slot.host) {
    SBTRAIN_CUDA_CHECK(cudaMallocHost(&slot.host, kSlotBytes));
    SBTRAIN_CUDA_CHECK(cudaEventCreateWithFlags(&slot.free, cudaEventDisableTiming));
  }
  SBTRAIN_CUDA_CHECK(cudaEventSynchronize(slot.free));
  return slot;
}

void Staging::upload(cudaStream_t stream, void* device, const void* host, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kSlotBytes) {
    const size_t count = std::min(kSlotBytes, bytes - at);
    Slot& slot = next_slot();
    std::memcpy(slot.host, static_cast<const std::byte*>(host) + at, count);
    SBTRAIN_CUDA_CHECK(cudaMemcpyAsync(static_cast<std::byte*>(device) + at, slot.host, count,
                                       cudaMemcpyHostToDevice, stream));
    SBTRAIN_CUDA_CHECK(cudaEventRecord(slot.free, stream));
  }
}

// All slots but one hold parts that are arriving while the oldest part is copied out.
void Staging::download(cudaStream_t stream, void* host, const void* device, size_t bytes) {
  struct Arriving {
    Slot* slot;
    size_t at, count;
  };
  std::vector<Arriving> arriving;
  const auto receive = [&](const Arriving& part) {
    SBTRAIN_CUDA_CHECK(cudaEventSynchronize(part.slot->free));
    std::memcpy(static_cast<std::byte*>(host) + part.at, part.slot->host, part.count);
  };
  for (size_t at = 0; at < bytes; at += kSlotBytes) {
    if (arriving.size() == slots_.size() - 1) {
      receive(arriving.front());
      arriving.erase(arriving.begin());
    }
    const size_t count = std::min(kSlotBytes, bytes - at);
    Slot& slot = next_slot();
    SBTRAIN_CUDA_CHECK(cudaMemcpyAsync(slot.host, static_cast<const std::byte*>(device) + at, count,
                                       cudaMemcpyDeviceToHost, stream));
    SBTRAIN_CUDA_CHECK(cudaEventRecord(slot.free, stream));
    arriving.push_back({&slot, at, count});
  }
  for (const Arriving& part : arriving) receive(part);
}

// ---- Context --------------------------------------------------------------------------------

Context::Context(cudaStream_t queue) : stream(queue) {
  int index = 0;
  SBTRAIN_CUDA_CHECK(cudaGetDevice(&index));
  SBTRAIN_CUDA_CHECK(cudaGetDeviceProperties(&device, index));
  SBTRAIN_CUBLAS_CHECK(cublas_lt().Create(&blas));
  tuner.open(device.name);
}

Context::~Context() {
  cudaStreamSynchronize(stream);
  attention.reset();
  for (const Mark& mark : marks) {
    cudaEventDestroy(mark.begin);
    cudaEventDestroy(mark.end);
  }
  for (const ReadSlot& slot : reads) {
    cudaEventDestroy(slot.done);
    cudaFreeHost(slot.values);
  }
  if (beside_) {
    cudaEventDestroy(forked_);
    cudaEventDestroy(joins_);
    cudaStreamDestroy(beside_);
  }
  cudaFree(counters_);
  cublas_lt().Destroy(blas);
}

int32_t* Context::counters() {
  if (counters_) return counters_;
  const auto blocks = static_cast<size_t>(kernels::decode_blocks(device.multiProcessorCount));
  const size_t bytes = blocks * sizeof(int32_t);
  void* zeros = nullptr;
  SBTRAIN_CUDA_CHECK(cudaMalloc(&zeros, bytes));
  counters_ = static_cast<int32_t*>(zeros);
  SBTRAIN_CUDA_CHECK(cudaMemsetAsync(counters_, 0, bytes, stream));
  return counters_;
}

void Context::check_after_waits(std::function<void()> check) {
  after_wait = check ? std::move(check) : [] {};
}

std::string Context::choices(bool remember) {
  if (remember) tuner.save();
  return tuner.text();
}

bool is_recorded(const Stream& s) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  SBTRAIN_CUDA_CHECK(cudaStreamIsCapturing(cuda_stream(s), &status));
  return status == cudaStreamCaptureStatusActive;
}

cudaStream_t cuda_stream(const Stream& s) {
  return context(s).stream;
}

bool begins_early(const Stream& s) {
  return context(s).overlap && is_recorded(s);
}

// What the stream is given from the constructor to go_on() runs beside what it is given from there
// to the destructor.
class Beside {
 public:
  explicit Beside(Context& c) : context_(c), main_(c.stream) {
    if (!c.beside_) {
      SBTRAIN_CUDA_CHECK(cudaStreamCreateWithFlags(&c.beside_, cudaStreamNonBlocking));
      SBTRAIN_CUDA_CHECK(cudaEventCreateWithFlags(&c.forked_, cudaEventDisableTiming));
      SBTRAIN_CUDA_CHECK(cudaEventCreateWithFlags(&c.joins_, cudaEventDisableTiming));
    }
    SBTRAIN_CUDA_CHECK(cudaEventRecord(c.forked_, main_));
    SBTRAIN_CUDA_CHECK(cudaStreamWaitEvent(c.beside_, c.forked_));
    c.stream = c.beside_;
  }
  // A record that lacks the wait is refused when it ends, so an error here is found there.
  ~Beside() {
    context_.stream = main_;
    cudaStreamWaitEvent(main_, context_.joins_);
  }
  Beside(const Beside&) = delete;
  Beside& operator=(const Beside&) = delete;
  void go_on() {
    SBTRAIN_CUDA_CHECK(cudaEventRecord(context_.joins_, context_.beside_));
    context_.stream = main_;
  }

 private:
  Context& context_;
  const cudaStream_t main_;
};

void run_both(Stream& s, const Buffer& workspace, const Buffer& second, const Work& first,
              const Work& other) {
  if (!second.tensor().defined() || !is_recorded(s)) {
    first(workspace);
    return other(workspace);
  }
  Beside beside(context(s));
  first(second);
  beside.go_on();
  other(workspace);
}

StreamControl& control(const Stream& s) {
  return context(s);
}

Context& context(const Stream& s) {
  // Creating the context changes nothing that users of a const stream can see.
  if (!s.context()) {
    auto& mine = const_cast<Stream&>(s);
    mine.set_context(std::make_unique<Context>(mine.queue()));
  }
  return static_cast<Context&>(*s.context());
}

// ---- Timing -----------------------------------------------------------------------------------

int Context::begin_mark(std::string_view op) {
  if (marks_used == marks.size()) {
    Mark mark{};
    SBTRAIN_CUDA_CHECK(cudaEventCreate(&mark.begin));
    SBTRAIN_CUDA_CHECK(cudaEventCreate(&mark.end));
    marks.push_back(mark);
  }
  const auto mark = static_cast<int>(marks_used++);
  marks[mark].op = op;
  SBTRAIN_CUDA_CHECK(cudaEventRecord(marks[mark].begin, stream));
  return mark;
}

void Context::end_mark(int mark) {
  cudaEventRecord(marks[mark].end, stream);
}

void Context::trace(const std::vector<Traced>& streams) {
  cudaEvent_t event = nullptr;
  SBTRAIN_CUDA_CHECK(cudaEventCreate(&event));
  const std::shared_ptr<CUevent_st> begin(event, cudaEventDestroy);
  SBTRAIN_CUDA_CHECK(cudaEventRecord(event, stream));
  // Otherwise a stream that is synchronized before the first one could not count from the event.
  SBTRAIN_CUDA_CHECK(cudaEventSynchronize(event));
  for (const Traced& each : streams) {
    require(each.stream->backend() == Backend::kCuda && each.stream->profile(),
            "a trace of a stream that is not on a GPU, or has no profile");
    Context& c = context(*each.stream);
    c.traced = each.ops;
    c.trace_begin = begin;
  }
}

// ---- Transfers --------------------------------------------------------------------------------

void run(Cuda, Stream& s, const Synchronize& /*op*/) {
  Context& c = context(s);
  SBTRAIN_CUDA_CHECK(cudaStreamSynchronize(c.stream));
  c.after_wait();
  if (!s.profile()) return;
  // The first mark may be this very synchronize(), whose end is not recorded yet.
  for (size_t i = 0; i < c.marks_used; ++i) {
    if (c.marks[i].op == Synchronize::kName) continue;
    float milliseconds = 0;
    SBTRAIN_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, c.marks[i].begin, c.marks[i].end));
    const double seconds = 1e-3 * static_cast<double>(milliseconds);
    s.profile()->add(c.marks[i].op, seconds);
    if (!c.traced) continue;
    SBTRAIN_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, c.trace_begin.get(), c.marks[i].begin));
    c.traced->push_back({c.marks[i].op, 1e-3 * static_cast<double>(milliseconds), seconds});
  }
  c.marks_used = 0;
  c.traced = nullptr;
  c.trace_begin.reset();
}

namespace {

struct PinnedRead : HostRead {
  PinnedRead(Context& c, const Tensor& x) : context(c), count(static_cast<size_t>(x.numel())) {
    require(count <= Context::kReadValues && x.contiguous(), "a host read of {}", x.describe());
    if (c.reads.empty()) {
      SBTRAIN_CUDA_CHECK(cudaMallocHost(reinterpret_cast<void**>(&slot.values),
                                        Context::kReadValues * sizeof(double)));
      SBTRAIN_CUDA_CHECK(cudaEventCreateWithFlags(&slot.done, cudaEventDisableTiming));
    } else {
      slot = c.reads.back();
      c.reads.pop_back();
    }
    SBTRAIN_CUDA_CHECK(
        cudaMemcpyAsync(slot.values, x.f64(), x.bytes(), cudaMemcpyDeviceToHost, c.stream));
    SBTRAIN_CUDA_CHECK(cudaEventRecord(slot.done, c.stream));
  }
  ~PinnedRead() override {
    cudaEventSynchronize(slot.done);
    context.reads.push_back(slot);
  }
  std::span<const double> wait() override {
    SBTRAIN_CUDA_CHECK(cudaEventSynchronize(slot.done));
    context.after_wait();
    return {slot.values, count};
  }
  bool ready() const override {
    const cudaError_t state = cudaEventQuery(slot.done);
    // This is no error, but would be taken for one by the next check.
    if (state == cudaErrorNotReady) cudaGetLastError();
    return state == cudaSuccess;
  }
  Context& context;
  Context::ReadSlot slot;
  size_t count;
};

}  // namespace

std::unique_ptr<HostRead> Context::read(const Tensor& x) {
  return std::make_unique<PinnedRead>(*this, x);
}

}  // namespace sbtrain::ops::cuda
