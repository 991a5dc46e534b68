// A world of ranks that are threads of this process and share one GPU: the path of several GPUs on
// one. Data moves by copies within the device, and events order them: a rank's stream waits for the
// streams of the others, as in a library for several GPUs, while the threads themselves wait only
// for each other's calls. Sums are formed in rank order.
//
// The calls meet on the communicator of thread_world.h, whose errors these are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/cuda_check.h"
#include "ops/memory.h"
#include "support/thread_world.h"

namespace sbtrain::test {

class GpuThreadRank : public Communicator {
 public:
  // `host` must outlive this one.
  explicit GpuThreadRank(Communicator& host) : host_(host) {
    for (cudaEvent_t* event : {&ready_, &done_}) {
      SBTRAIN_CUDA_CHECK(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
    }
  }
  ~GpuThreadRank() override {
    cudaEventDestroy(ready_);
    cudaEventDestroy(done_);
  }

  int rank() const override { return host_.rank(); }
  int world() const override { return host_.world(); }
  void sum(std::span<double> values) override { host_.sum(values); }
  std::string broadcast(std::string value, int root) override {
    return host_.broadcast(std::move(value), root);
  }
  std::vector<std::string> all_gather(std::string value) override {
    return host_.all_gather(std::move(value));
  }
  void barrier() override { host_.barrier(); }
  std::unique_ptr<Communicator> split(const ColorOf& color_of) override {
    return std::unique_ptr<Communicator>(new GpuThreadRank(host_.split(color_of)));
  }

 protected:
  void run_all_gather(Stream& s, const Tensor& full, const Tensor& shard) override {
    const Calls calls = meet(s, "all_gather of " + shard.describe(), shard);
    for (int r = 0; r < world(); ++r) copy(s, part(full, r).data, calls[r].data, shard.bytes());
    part_with(s, calls);
  }
  void run_reduce_scatter(Stream& s, const Tensor& shard, const Tensor& full) override {
    const Calls calls = meet(s, "reduce_scatter of " + full.describe(), full);
    Scratch total(s, shard.bytes());
    sum_parts(s, total.like(shard), calls, shard.bytes() * static_cast<size_t>(rank()));
    part_with(s, calls);  // a shard may lie in `full`, which others may read until now
    copy(s, shard.data, total.data(), shard.bytes());
  }
  void run_all_to_all(Stream& s, const Tensor& to, const Tensor& from) override {
    const Calls calls = meet(s, "all_to_all of " + from.describe(), from);
    const size_t bytes = from.bytes() / static_cast<size_t>(world());
    for (int r = 0; r < world(); ++r) {
      if (r != rank()) copy(s, part(to, r).data, calls[r].data + bytes * rank(), bytes);
    }
    part_with(s, calls);
  }
  void run_shift(Stream& s, const Tensor& to, const Tensor& from, Neighbours ring) override {
    const int step = (ring.target - rank() + world()) % world();
    const Calls calls = meet(s, fmt::format("shift of {} by {}", from.describe(), step), from);
    copy(s, to.data, calls[ring.source].data, from.bytes());
    part_with(s, calls);
  }
  void run_all_reduce(Stream& s, const Tensor& x) override {
    const Calls calls = meet(s, "all_reduce of " + x.describe(), x);
    Scratch total(s, x.bytes());
    sum_parts(s, total.like(x), calls, 0);
    part_with(s, calls);
    copy(s, x.data, total.data(), x.bytes());
  }
  void run_broadcast(Stream& s, const Tensor& x, int root) override {
    const Calls calls = meet(s, fmt::format("broadcast of {} by rank {}", x.describe(), root), x);
    if (rank() != root) copy(s, x.data, calls[root].data, x.bytes());
    part_with(s, calls);
  }

 private:
  // What a rank shows the others.
  struct Call {
    std::byte* data;
    cudaEvent_t ready, done;
  };
  using Calls = std::vector<Call>;

  // Memory of the device in the order of a stream.
  class Scratch {
   public:
    Scratch(Stream& s, size_t bytes) : queue_(s.queue()) {
      if (bytes > 0) SBTRAIN_CUDA_CHECK(cudaMallocAsync(&data_, bytes, queue_));
    }
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() {
      if (data_) cudaFreeAsync(data_, queue_);
    }
    void* data() const { return data_; }
    Tensor like(const Tensor& x) const { return Tensor(data_, x.dtype, {x.numel()}); }

   private:
    void* data_ = nullptr;
    cudaStream_t queue_;
  };

  explicit GpuThreadRank(std::unique_ptr<Communicator> host) : GpuThreadRank(*host) {
    owned_ = std::move(host);
  }

  // Returns when all ranks have made this call. What the stream does from now on sees what theirs
  // were given before.
  Calls meet(Stream& s, const std::string& what, const Tensor& x) {
    SBTRAIN_CUDA_CHECK(cudaEventRecord(ready_, s.queue()));
    const Call mine = {static_cast<std::byte*>(x.data), ready_, done_};
    std::string message(sizeof(Call), '\0');
    std::memcpy(message.data(), &mine, sizeof(Call));
    const std::vector<std::string> all = host_.all_gather(message + what);
    // All ranks throw where calls differ, and the first one to end destroys its events: none of
    // them may be used before.
    for (size_t r = 0; r < all.size(); ++r) {
      if (const std::string other = all[r].substr(sizeof(Call));
          other != all[0].substr(sizeof(Call)))
        fail(ExitCode::kInternal, "rank 0 calls {}, but rank {} calls {}",
             all[0].substr(sizeof(Call)), r, other);
    }
    Calls calls(all.size());
    for (size_t r = 0; r < all.size(); ++r) {
      std::memcpy(&calls[r], all[r].data(), sizeof(Call));
      SBTRAIN_CUDA_CHECK(cudaStreamWaitEvent(s.queue(), calls[r].ready, 0));
    }
    return calls;
  }
  // What the stream does from now on comes after what all ranks do in the collective. By then each
  // has waited for the events of the others, so that they can be recorded again.
  void part_with(Stream& s, const Calls& calls) {
    SBTRAIN_CUDA_CHECK(cudaEventRecord(done_, s.queue()));
    host_.barrier();
    for (const Call& call : calls) {
      SBTRAIN_CUDA_CHECK(cudaStreamWaitEvent(s.queue(), call.done, 0));
    }
    host_.barrier();  // a rank that ends destroys its events, which the others wait for until here
  }

  Tensor part(const Tensor& full, int rank) const {
    const int64_t n = full.numel() / world();
    return full.reshaped({full.numel()}).row_range(n * rank, n);
  }
  static void copy(Stream& s, void* to, const void* from, size_t bytes) {
    if (bytes == 0 || to == from) return;
    SBTRAIN_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, s.queue()));
  }
  // total = the sum of what all ranks have `offset` bytes behind the start of their tensors.
  static void sum_parts(Stream& s, const Tensor& total, const Calls& calls, size_t offset) {
    if (total.numel() == 0) return;
    const bool on_device = total.dtype == DType::kF32 || total.dtype == DType::kBF16;
    if (!on_device) return sum_on_host(s, total, calls, offset);
    copy(s, total.data, calls[0].data + offset, total.bytes());
    for (size_t r = 1; r < calls.size(); ++r) {
      const Tensor x(calls[r].data + offset, total.dtype, {total.numel()});
      const auto rows = [&](const Tensor& t) { return t.reshaped({1, total.numel()}); };
      ops::run(s, ops::Add{.y = rows(total), .x = rows(x)});
    }
  }
  // There are no kernels for other types.
  static void sum_on_host(Stream& s, const Tensor& total, const Calls& calls, size_t offset) {
    std::vector<std::byte> sum(total.bytes()), x(total.bytes());
    SBTRAIN_CUDA_CHECK(cudaStreamSynchronize(s.queue()));
    for (size_t r = 0; r < calls.size(); ++r) {
      SBTRAIN_CUDA_CHECK(cudaMemcpy((r == 0 ? sum : x).data(), calls[r].data + offset,
                                    total.bytes(), cudaMemcpyDeviceToHost));
      if (r > 0) add_elements(total.dtype, sum.data(), x.data(), total.numel());
    }
    SBTRAIN_CUDA_CHECK(
        cudaMemcpyAsync(total.data, sum.data(), sum.size(), cudaMemcpyHostToDevice, s.queue()));
    SBTRAIN_CUDA_CHECK(cudaStreamSynchronize(s.queue()));
  }

  std::unique_ptr<Communicator> owned_;
  Communicator& host_;
  cudaEvent_t ready_ = nullptr, done_ = nullptr;
};

// Runs `body` on `world` ranks, each in a thread of its own, as run_ranks() does.
inline void run_gpu_ranks(int world, const std::function<void(Communicator&)>& body) {
  run_ranks(world, [&](Communicator& host) {
    GpuThreadRank mine(host);
    body(mine);
  });
}

}  // namespace sbtrain::test
