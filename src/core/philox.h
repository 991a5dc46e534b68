// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
// a counter-based generator. A number depends only on (seed, purpose, name, element, step), so
// it is the same for every world size, thread count and order of evaluation.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "kernels/philox.h"

namespace sbtrain {

// What a stream of random numbers is for; part of the key, so streams never overlap.
enum class RandomPurpose : uint32_t {
  kInit = 1,
  kDataOrder = 2,
  kSampling = 3,
  kTask = 4,
  kBootstrap = 5,
  kTest = 99
};

// Ten rounds of Philox4x32 on `counter` with `key`.
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// 64-bit FNV-1a; stable across platforms and versions.
uint64_t hash_name(std::string_view name);

// One independent stream of numbers, indexed by element.
class Philox {
 public:
  Philox(uint64_t seed, RandomPurpose purpose, std::string_view name, uint64_t step = 0);

  uint32_t bits(uint64_t element) const;    // uniform 32 bits
  uint64_t bits64(uint64_t element) const;  // uniform 64 bits
  double uniform(uint64_t element) const;   // [0, 1), 53 bits
  double normal(uint64_t element) const;    // mean 0, std 1 (Box-Muller), the same bits on a GPU

  // What else than the element makes the numbers.
  kernels::PhiloxStream stream() const {
    return {{{key_[0], key_[1]}}, {counter_high_[0], counter_high_[1]}};
  }

 private:
  std::array<uint32_t, 4> block(uint64_t element) const;
  std::array<uint32_t, 2> key_;
  std::array<uint32_t, 2> counter_high_;
};

}  // namespace sbtrain
