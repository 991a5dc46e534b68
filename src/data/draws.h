// The random numbers of generated examples.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "core/philox.h"

namespace sbtrain {

// The random numbers of one example, in the order in which they are drawn.
class Draws {
 public:
  explicit Draws(const Philox& random) : random_(random) {}
  double uniform() { return random_.uniform(next_++); }  // [0, 1)
  // Uniform in [0, n), from 64 random bits, so that the bias is below n / 2^64.
  int64_t below(int64_t n) {
    const auto product =
        static_cast<unsigned __int128>(random_.bits64(next_++)) * static_cast<unsigned __int128>(n);
    return static_cast<int64_t>(product >> 64);
  }
  uint64_t bits64() { return random_.bits64(next_++); }

 private:
  Philox random_;
  uint64_t next_ = 0;
};

// Puts `count` of the values, drawn without replacement, in front (the start of a Fisher-Yates
// shuffle). The first ones do not depend on `count`.
template <typename T>
void shuffle_front(Draws& draws, std::vector<T>& values, int64_t count) {
  const auto n = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < count; ++i) {
    std::swap(values[static_cast<size_t>(i)], values[static_cast<size_t>(i + draws.below(n - i))]);
  }
}

template <typename T>
void shuffle(Draws& draws, std::vector<T>& values) {
  shuffle_front(draws, values, static_cast<int64_t>(values.size()));
}

// `count` different numbers of first .. first + n - 1.
inline std::vector<int32_t> draw_distinct(Draws& draws, int64_t first, int64_t n, int64_t count) {
  std::vector<int32_t> values(static_cast<size_t>(n));
  std::iota(values.begin(), values.end(), static_cast<int32_t>(first));
  shuffle_front(draws, values, count);
  values.resize(static_cast<size_t>(count));
  return values;
}

}  // namespace sbtrain
