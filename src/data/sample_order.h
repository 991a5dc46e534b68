// The order in which rows or documents are seen: a keyed permutation that is computed, not stored.
//
// A Feistel network, with Philox as its round function, permutes the numbers of the fewest bits
// (at least 8) that hold n - 1; it is applied again until the result is inside [0, n) (cycle
// walking: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). The result is
// a bijection of [0, n) in O(1) memory, so any place in any epoch is computed directly.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string_view>

#include "core/philox.h"

namespace sbtrain {

class Permutation {
 public:
  // The permutation of [0, n) that belongs to (seed, name, epoch).
  Permutation(uint64_t seed, std::string_view name, uint64_t epoch, int64_t n)
      : round_(seed, RandomPurpose::kDataOrder, name, epoch), n_(static_cast<uint64_t>(n)) {
    // Fewer than 8 bits make a poor cipher; a longer walk costs little on so few elements.
    const int bits = std::max(8, static_cast<int>(std::bit_width(n_ > 0 ? n_ - 1 : 0)));
    low_bits_ = bits / 2;
    high_bits_ = bits - low_bits_;
  }

  int64_t size() const { return static_cast<int64_t>(n_); }

  // Where element i of [0, n) goes.
  int64_t operator()(int64_t i) const {
    auto x = static_cast<uint64_t>(i);
    do x = encrypt(x);
    while (x >= n_);
    return static_cast<int64_t>(x);
  }

 private:
  static constexpr uint64_t kRounds = 4;  // each changes both halves

  uint64_t encrypt(uint64_t x) const {
    const uint64_t low_mask = (uint64_t{1} << low_bits_) - 1;
    const uint64_t high_mask = (uint64_t{1} << high_bits_) - 1;
    uint64_t low = x & low_mask;
    uint64_t high = x >> low_bits_;
    for (uint64_t round = 0; round < kRounds; ++round) {
      high ^= round_.bits(round << 40 | low) & high_mask;
      low ^= round_.bits((kRounds + round) << 40 | high) & low_mask;
    }
    return high << low_bits_ | low;
  }

  Philox round_;
  uint64_t n_;
  int low_bits_;
  int high_bits_;
};

}  // namespace sbtrain
