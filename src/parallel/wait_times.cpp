#include "parallel/wait_times.h"

#include <utility>

#include "core/build_options.h"
#include "ops/stream_control.h"

#if SBTRAIN_HAS_CUDA
#include "core/cuda_check.h"
#endif

namespace sbtrain {

WaitTimes::~WaitTimes() {
#if SBTRAIN_HAS_CUDA
  batches_.push_back(std::move(current_));
  batches_.push_back(std::move(spare_));
  for (const std::vector<Mark>& batch : batches_) {
    for (const Mark& mark : batch) {
      cudaEventDestroy(mark.begin);
      cudaEventDestroy(mark.end);
    }
  }
#endif
}

WaitTimes::Mark WaitTimes::spare() {
  Mark mark;
  if (!spare_.empty()) {
    mark = spare_.back();
    spare_.pop_back();
    return mark;
  }
#if SBTRAIN_HAS_CUDA
  SBTRAIN_CUDA_CHECK(cudaEventCreate(&mark.begin));
  SBTRAIN_CUDA_CHECK(cudaEventCreate(&mark.end));
#endif
  return mark;
}

void WaitTimes::wait(const Event& event, std::string_view name) {
  if (stream_.backend() != Backend::kCuda) return ops::await(stream_, event, name);
#if SBTRAIN_HAS_CUDA
  current_.push_back(spare());
  SBTRAIN_CUDA_CHECK(cudaEventRecord(current_.back().begin, stream_.queue()));
  ops::await(stream_, event, name);
  SBTRAIN_CUDA_CHECK(cudaEventRecord(current_.back().end, stream_.queue()));
#endif
}

void WaitTimes::end_batch() {
  batches_.push_back(std::exchange(current_, {}));
}

void WaitTimes::drop() {
  spare_.insert(spare_.end(), current_.begin(), current_.end());
  current_.clear();
}

double WaitTimes::take_batch() {
  if (batches_.empty()) return 0;
  const std::vector<Mark> batch = std::move(batches_.front());
  batches_.pop_front();
  double seconds = 0;
  for ([[maybe_unused]] const Mark& mark : batch) {
#if SBTRAIN_HAS_CUDA
    float milliseconds = 0;
    SBTRAIN_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, mark.begin, mark.end));
    seconds += milliseconds / 1e3;
#endif
  }
  spare_.insert(spare_.end(), batch.begin(), batch.end());
  return seconds;
}

}  // namespace sbtrain
