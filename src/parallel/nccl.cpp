#include "parallel/nccl.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "core/error.h"
#include "core/host_threads.h"
#include "parallel/job_communicator.h"
#include "parallel/nccl_library.h"

namespace sbtrain {
namespace {

using Clock = std::chrono::steady_clock;

// A communicator of NCCL, and the lock that keeps the thread that aborts it apart from the one that
// uses it.
struct Handle {
  std::timed_mutex mutex;
  ncclComm_t comm = nullptr;
  std::atomic<bool> aborted = false;
};

// From the thread of Control. The thread that uses the communicator may be inside NCCL, waiting for
// a rank that is gone or for room in a queue that no longer moves. It holds the lock then, and only
// the abort itself can free it. Otherwise it holds the lock for microseconds.
void abort(Handle& handle) {
  std::unique_lock lock(handle.mutex, std::defer_lock);
  [[maybe_unused]] const bool locked = lock.try_lock_for(std::chrono::seconds(1));
  if (!handle.comm || handle.aborted.exchange(true)) return;
  nccl().CommAbort(handle.comm);
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return ncclFloat32;
    case DType::kBF16:
      return ncclBfloat16;
    case DType::kF64:
      return ncclFloat64;
    case DType::kI32:
      return ncclInt32;
    case DType::kI64:
      return ncclInt64;
    case DType::kU8:
    case DType::kE4M3:  // moved as bytes; sums of fp8 are not formed
    case DType::kE5M2:
      return ncclUint8;
  }
  fail(ExitCode::kInternal, "no such type");
}

[[noreturn]] void lose(const Control& control, std::string_view what, ncclResult_t result) {
  control.check();  // the cause, if the job knows it
  fail(ExitCode::kCommunication, "{} failed in NCCL: {}{}{}", what, nccl().GetErrorString(result),
       *nccl().GetLastError(nullptr) ? ": " : "", nccl().GetLastError(nullptr));
}

// NCCL's functions that connect ranks wait for all of them, without a limit. (Communicators of NCCL
// that do not block would start a thread for every collective.)
void connect(const Control& control, const std::string& what, std::chrono::seconds timeout,
             const std::function<ncclResult_t()>& call) {
  int device = 0;
  cudaGetDevice(&device);
  auto result = std::make_shared<ncclResult_t>(ncclSuccess);
  const Clock::time_point deadline = Clock::now() + timeout;
  call_or_leave(
      [=] {
        cudaSetDevice(device);
        *result = call();
      },
      [&] {
        control.check();
        if (Clock::now() < deadline) return;
        fail(ExitCode::kCommunication, "{} is not done after {} s", what, timeout.count());
      });
  if (*result != ncclSuccess) lose(control, what, *result);
}

ncclConfig_t config_of(const CommunicatorOptions& options) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  if (options.min_ctas > 0) config.minCTAs = options.min_ctas;
  if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
  if (options.copy_engines) config.CTAPolicy = NCCL_CTA_POLICY_ZERO;
  return config;
}

class NcclCommunicator : public JobCommunicator {
 public:
  NcclCommunicator(Control& control, std::vector<int> members, std::string topic,
                   const CommunicatorOptions& options, ncclComm_t comm)
      : JobCommunicator(control, std::move(members), std::move(topic)),
        options_(options),
        handle_(std::make_shared<Handle>()) {
    handle_->comm = comm;
    on_failure_ = control.on_failure([handle = handle_](const JobFailure&) { abort(*handle); });
  }

  ~NcclCommunicator() override {
    on_failure_.reset();  // from here on nobody else aborts
    // A rank that ends with an error leaves collectives behind that nobody will join.
    const bool clean = std::uncaught_exceptions() == 0;
    const std::lock_guard lock(handle_->mutex);
    if (!handle_->aborted.exchange(true)) {
      clean ? nccl().CommDestroy(handle_->comm) : nccl().CommAbort(handle_->comm);
    }
    handle_->comm = nullptr;
  }

  std::shared_ptr<void> register_memory(const Tensor& memory) override {
    require(memory.contiguous(), "{} cannot be registered", memory.describe());
    return options_.copy_engines ? register_window(memory) : register_buffer(memory);
  }

 protected:
  std::unique_ptr<Communicator> make_group(int color, std::vector<int> members,
                                           std::string topic) override {
    auto comm = std::make_shared<ncclComm_t>(nullptr);
    connect(control(), fmt::format("making the group '{}'", topic), options_.connect_timeout,
            [comm, parent = handle_, color, key = rank(), options = options_] {
              ncclConfig_t config = config_of(options);
              return nccl().CommSplit(parent->comm, color, key, comm.get(), &config);
            });
    return std::make_unique<NcclCommunicator>(control(), std::move(members), std::move(topic),
                                              options_, *comm);
  }

  // What is only moved is bytes.
  void run_all_gather(Stream& s, const Tensor& full, const Tensor& shard) override {
    start(s, Collective::kAllGather, full, [&](ncclComm_t comm, cudaStream_t queue) {
      return nccl().AllGather(shard.data, full.data, shard.bytes(), ncclUint8, comm, queue);
    });
  }
  void run_broadcast(Stream& s, const Tensor& x, int root) override {
    start(s, Collective::kBroadcast, x, [&](ncclComm_t comm, cudaStream_t queue) {
      return nccl().Broadcast(x.data, x.data, x.bytes(), ncclUint8, root, comm, queue);
    });
  }
  void run_reduce_scatter(Stream& s, const Tensor& shard, const Tensor& full) override {
    start(s, Collective::kReduceScatter, full, [&](ncclComm_t comm, cudaStream_t queue) {
      return nccl().ReduceScatter(full.data, shard.data, static_cast<size_t>(shard.numel()),
                                  nccl_type(full.dtype), ncclSum, comm, queue);
    });
  }
  // The copy engines gather one rank's parts after another: NCCL's all-to-all would also copy this
  // rank's own part, and a copy within a GPU is a kernel, which waits for room among the others.
  void run_all_to_all(Stream& s, const Tensor& to, const Tensor& from) override {
    start(s, Collective::kAllToAll, from, [&](ncclComm_t comm, cudaStream_t queue) {
      const size_t bytes = from.bytes() / static_cast<size_t>(world());
      if (!options_.copy_engines) {
        return nccl().AlltoAll(from.data, to.data, bytes, ncclUint8, comm, queue);
      }
      const auto part = [&](const Tensor& x, int r) {
        return static_cast<std::byte*>(x.data) + bytes * static_cast<size_t>(r);
      };
      ncclResult_t result = ncclSuccess;
      for (int root = 0; root < world() && result == ncclSuccess; ++root) {
        result = nccl().Gather(part(root == rank() ? to : from, root), to.data, bytes, ncclUint8,
                               root, comm, queue);
      }
      return result;
    });
  }
  // One group, so that a rank may send before its neighbour receives.
  void run_shift(Stream& s, const Tensor& to, const Tensor& from, Neighbours ring) override {
    start(s, Collective::kShift, from, [&](ncclComm_t comm, cudaStream_t queue) {
      ncclResult_t result = nccl().GroupStart();
      if (result != ncclSuccess) return result;
      result = nccl().Send(from.data, from.bytes(), ncclUint8, ring.target, comm, queue);
      if (result == ncclSuccess) {
        result = nccl().Recv(to.data, to.bytes(), ncclUint8, ring.source, comm, queue);
      }
      const ncclResult_t ended = nccl().GroupEnd();
      return result == ncclSuccess ? ended : result;
    });
  }
  void run_all_reduce(Stream& s, const Tensor& x) override {
    start(s, Collective::kAllReduce, x, [&](ncclComm_t comm, cudaStream_t queue) {
      return nccl().AllReduce(x.data, x.data, static_cast<size_t>(x.numel()), nccl_type(x.dtype),
                              ncclSum, comm, queue);
    });
  }

 private:
  template <typename Call>
  void start(Stream& s, Collective collective, const Tensor& whole, Call call) {
    const cudaStream_t queue = s.queue();
    const std::string what =
        fmt::format("{} of {} (number {} in '{}')", collective_name(collective), whole.describe(),
                    started_++, topic());
    control().check();
    // Whatever the host waits for later, the device stands at this collective or an earlier one.
    control().waits_for(what);
    ncclResult_t result = ncclSuccess;
    {
      const std::lock_guard lock(handle_->mutex);
      result = handle_->aborted ? ncclInvalidUsage : call(handle_->comm, queue);
      // Errors of the network that NCCL met since the last call.
      if (result == ncclSuccess) nccl().CommGetAsyncError(handle_->comm, &result);
    }
    if (result == ncclSuccess) return;
    lose(control(), what, result);
  }

  std::shared_ptr<void> register_buffer(const Tensor& memory) {
    void* registered = nullptr;
    const ncclResult_t result =
        nccl().CommRegister(handle_->comm, memory.data, memory.bytes(), &registered);
    if (result != ncclSuccess) lose(control(), "registering " + memory.describe(), result);
    return {registered, [handle = handle_](void* of) {
              const std::lock_guard lock(handle->mutex);
              if (of && !handle->aborted) nccl().CommDeregister(handle->comm, of);
            }};
  }

  std::shared_ptr<void> register_window(const Tensor& memory) {
    auto window = std::make_shared<ncclWindow_t>(nullptr);
    connect(control(), "registering " + memory.describe(), options_.connect_timeout,
            [window, handle = handle_, memory] {
              return nccl().CommWindowRegister(handle->comm, memory.data, memory.bytes(),
                                               window.get(), NCCL_WIN_COLL_SYMMETRIC);
            });
    return {*window, [handle = handle_](ncclWindow_t of) {
              const std::lock_guard lock(handle->mutex);
              if (of && !handle->aborted) nccl().CommWindowDeregister(handle->comm, of);
            }};
  }

  CommunicatorOptions options_;
  int64_t started_ = 0;
  std::shared_ptr<Handle> handle_;
  Control::FailureHandle on_failure_;
};

// The first rank draws the identity of the communicator, and tells the others.
ncclUniqueId agree_on_id(Control& control, const std::vector<int>& members,
                         const std::string& topic) {
  ncclUniqueId id;
  std::string text;
  if (control.rank() == members.front()) {
    const ncclResult_t result = nccl().GetUniqueId(&id);
    if (result != ncclSuccess) lose(control, "starting NCCL", result);
    for (const char byte : id.internal) text += fmt::format("{:02x}", static_cast<uint8_t>(byte));
  }
  text = control.exchange(topic, members, std::move(text)).front();
  require(text.size() == 2 * sizeof(id.internal), "rank {} sent no identity for NCCL",
          members.front());
  for (size_t i = 0; i < sizeof(id.internal); ++i) {
    id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  }
  return id;
}

}  // namespace

std::unique_ptr<Communicator> make_nccl(Control& control, const CommunicatorOptions& options) {
  // Before NCCL first reads its environment. Trees and switches add in an order of their own, which
  // may differ from one size, or one number of ranks, to the next.
  setenv("NCCL_ALGO", "Ring", /*overwrite=*/0);
  std::vector<int> members = all_ranks(control.world());
  const std::string topic = "collectives";
  const ncclUniqueId id = agree_on_id(control, members, topic);
  auto comm = std::make_shared<ncclComm_t>(nullptr);
  connect(control, fmt::format("connecting {} GPUs by NCCL", control.world()),
          options.connect_timeout, [=, rank = control.rank(), world = control.world()] {
            ncclConfig_t config = config_of(options);
            return nccl().CommInitRankConfig(comm.get(), world, id, rank, &config);
          });
  return std::make_unique<NcclCommunicator>(control, std::move(members), topic, options, *comm);
}

std::shared_ptr<void> nccl_allocate(size_t bytes) {
  void* data = nullptr;
  if (nccl().MemAlloc(&data, bytes) != ncclSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return {data, [](void* of) { nccl().MemFree(of); }};
}

}  // namespace sbtrain
