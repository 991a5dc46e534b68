// Tools of the benchmarks: random tensors, rotating buffers, medians.
#pragma once

#include <array>
#include <chrono>
#include <functional>
#include <string_view>
#include <vector>

#include "core/stream.h"

namespace sbtrain {

// The median; of an even number, the upper one.
double median(std::vector<double> values);

double seconds_since(std::chrono::steady_clock::time_point start);

// Makes tensors on the stream's device. Normal numbers repeat a sequence of about a million, which
// each tensor begins at another place.
class RandomTensors {
 public:
  explicit RandomTensors(Stream& s);
  DType compute() const { return stream_.memory().compute_dtype(); }

  Buffer empty(DType dtype, std::initializer_list<int64_t> shape);
  Buffer normal(DType dtype, std::initializer_list<int64_t> shape, float std = 1.0f);
  Buffer constant(DType dtype, std::initializer_list<int64_t> shape, float value);
  Buffer integers(const std::vector<int32_t>& values);

 private:
  Stream& stream_;
  Buffer numbers_;
  int64_t place_ = 0;
};

// Throws ExitCode::kOutOfMemory, before any number is drawn, if `host_bytes` do not fit the host or
// tensors of the compute type of these shapes do not fit the device. Later allocations are checked
// one by one.
void require_sizes(Backend backend, int64_t host_bytes, std::array<int64_t, 2> activations,
                   std::array<int64_t, 2> weights);

using Tensors = std::vector<Buffer>;
template <typename... Buffers>
Tensors tensors(Buffers... buffers) {
  Tensors all;
  (all.push_back(std::move(buffers)), ...);
  return all;
}

// Several sets of the tensors of one call, used in turn. Before a set is used again, at least
// kColdBytes of the other sets have passed through the caches; small sets are limited to kMostSets.
class Rotation {
 public:
  explicit Rotation(const std::function<Tensors()>& make);
  const Tensors& at(int64_t call) const { return sets_[call % count()]; }
  int64_t count() const { return static_cast<int64_t>(sets_.size()); }

 private:
  static constexpr size_t kColdBytes = size_t{256} << 20;
  static constexpr size_t kMostSets = 64;
  std::vector<Tensors> sets_;
};

// Whether `op`, as profiles name it, is a product with a matrix of weights.
bool is_matrix_product(std::string_view op);

// The times of all ops in call(0), call(1), ... call(repeats - 1), without waiting in between.
OpProfile profile_of(Stream& s, int64_t repeats, const std::function<void(int64_t)>& call);

// Calls `call` with the sets of `rotation`, without waiting in between, and returns the median time
// of `op` in the last `repeats` calls. One round through `rotation` comes first, so that scratch is
// allocated, alternatives are chosen (`tune`) and the device is busy when the timed calls start.
double median_seconds(Stream& s, std::string_view op, const Rotation& rotation, int64_t repeats,
                      const std::function<void(const Tensors&)>& call, bool tune = false);

}  // namespace sbtrain
