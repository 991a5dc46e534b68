#include "bench/timing.h"

#include <algorithm>

#include "core/error.h"
#include "core/memory_check.h"
#include "core/philox.h"
#include "ops/memory.h"
#include "ops/stream_control.h"

namespace sbtrain {
namespace {

constexpr int64_t kNumbers = (int64_t{1} << 20) + 7;  // not a multiple of any row

struct ProfileScope {
  ProfileScope(Stream& s, OpProfile& profile) : stream(s) { s.set_profile(&profile); }
  ~ProfileScope() { stream.set_profile(nullptr); }
  ProfileScope(const ProfileScope&) = delete;
  ProfileScope& operator=(const ProfileScope&) = delete;
  Stream& stream;
};

Tensor elements(const Tensor& t, int64_t begin, int64_t count) {
  return t.reshaped({t.numel()}).row_range(begin, count).reshaped({1, count});
}

}  // namespace

double median(std::vector<double> values) {
  require(!values.empty(), "a median of nothing");
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void require_sizes(Backend backend, int64_t host_bytes, std::array<int64_t, 2> activations,
                   std::array<int64_t, 2> weights) {
  MemoryReport host;
  host.persistent[static_cast<int>(MemoryClass::kInputs)] = static_cast<size_t>(host_bytes);
  require_memory(Backend::kCpu, host, "the benchmark", "Lower --tokens.");
  const auto bytes = [&](const std::array<int64_t, 2>& shape) {
    const DType dtype = backend == Backend::kCuda ? DType::kBF16 : DType::kF32;
    require_possible("bench", dtype, shape);
    return Tensor(nullptr, dtype, shape).bytes();
  };
  MemoryReport device;
  device.persistent[static_cast<int>(MemoryClass::kActivations)] = bytes(activations);
  device.persistent[static_cast<int>(MemoryClass::kWeights)] = bytes(weights);
  require_memory(backend, device, "the benchmark", "Lower --tokens, --width or other sizes.");
}

RandomTensors::RandomTensors(Stream& s) : stream_(s) {
  const Philox random(1, RandomPurpose::kTest, "bench");
  std::vector<float> values(kNumbers);
  for (int64_t i = 0; i < kNumbers; ++i) values[i] = static_cast<float>(random.normal(i));
  numbers_ = empty(DType::kF32, {kNumbers});
  ops::run(s, ops::CopyFromHost{.y = numbers_, .host = values.data()});
}

Buffer RandomTensors::empty(DType dtype, std::initializer_list<int64_t> shape) {
  return stream_.memory().allocate(MemoryClass::kActivations, "bench", dtype, shape);
}

Buffer RandomTensors::normal(DType dtype, std::initializer_list<int64_t> shape, float std) {
  Buffer out = empty(dtype, shape);
  // Scales the numbers if `std` is not 1, and then copies them.
  Buffer scaled;
  Tensor from = numbers_;
  if (std != 1.0f) {
    std::vector<float> values(kNumbers);
    ops::run(stream_, ops::CopyToHost{.host = values.data(), .x = numbers_});
    for (float& x : values) x *= std;
    scaled = empty(DType::kF32, {kNumbers});
    ops::run(stream_, ops::CopyFromHost{.y = scaled, .host = values.data()});
    from = scaled;
  }
  const int64_t n = out.tensor().numel();
  for (int64_t done = 0; done < n;) {
    const int64_t count = std::min(n - done, kNumbers - place_);
    ops::run(stream_,
             ops::Copy{.y = elements(out, done, count), .x = elements(from, place_, count)});
    place_ = (place_ + count) % kNumbers;
    done += count;
  }
  place_ = (place_ + 12347) % kNumbers;
  return out;
}

Buffer RandomTensors::constant(DType dtype, std::initializer_list<int64_t> shape, float value) {
  Buffer out = empty(dtype, shape);
  ops::run(stream_, ops::Fill{.x = out, .value = value});
  return out;
}

Buffer RandomTensors::integers(const std::vector<int32_t>& values) {
  Buffer out = empty(DType::kI32, {static_cast<int64_t>(values.size())});
  ops::run(stream_, ops::CopyFromHost{.y = out, .host = values.data()});
  return out;
}

Rotation::Rotation(const std::function<Tensors()>& make) {
  sets_.push_back(make());
  size_t bytes = 0;
  for (const Buffer& buffer : sets_.front()) bytes += buffer.tensor().bytes();
  const size_t count =
      std::clamp(kColdBytes / std::max<size_t>(bytes, 1) + 2, size_t{2}, kMostSets);
  while (sets_.size() < count) sets_.push_back(make());
}

bool is_matrix_product(std::string_view op) {
  return op == "linear" || op == "linear_backward" || op == "fp8_product";
}

OpProfile profile_of(Stream& s, int64_t repeats, const std::function<void(int64_t)>& call) {
  OpProfile profile;
  const ProfileScope scope(s, profile);
  for (int64_t n = 0; n < repeats; ++n) call(n);
  ops::run(s, ops::Synchronize{});
  return profile;
}

double median_seconds(Stream& s, std::string_view op, const Rotation& rotation, int64_t repeats,
                      const std::function<void(const Tensors&)>& call, bool tune) {
  if (tune) {
    ops::begin_tuning(s, "");
    call(rotation.at(0));
    ops::end_tuning(s);
  }
  for (int64_t n = 0; n < rotation.count(); ++n) call(rotation.at(n));
  const OpProfile profile = profile_of(s, repeats, [&](int64_t n) { call(rotation.at(n)); });
  const auto entry = profile.entries().find(op);
  require(entry != profile.entries().end(), "'{}' has not run", op);
  return median(entry->second.calls);
}

}  // namespace sbtrain
