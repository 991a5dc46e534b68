#include "core/philox.h"

#include <cmath>
#include <numbers>

namespace sbtrain {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(p0)};
    k[0] += 0x9E3779B9;
    k[1] += 0xBB67AE85;
  }
  return c;
}

uint64_t hash_name(std::string_view name) {
  uint64_t h = 0xcbf29ce484222325;
  for (const char ch : name) h = (h ^ static_cast<unsigned char>(ch)) * 0x100000001b3;
  return h;
}

Philox::Philox(uint64_t seed, RandomPurpose purpose, std::string_view name, uint64_t step) {
  // The key and the upper half of the counter are a hash of everything but the element.
  const std::array<uint32_t, 4> id = philox4x32(
      {static_cast<uint32_t>(step), static_cast<uint32_t>(step >> 32),
       static_cast<uint32_t>(hash_name(name)), static_cast<uint32_t>(hash_name(name) >> 32)},
      {static_cast<uint32_t>(seed) ^ static_cast<uint32_t>(purpose) * 0x85EBCA6B,
       static_cast<uint32_t>(seed >> 32)});
  key_ = {id[0], id[1]};
  counter_high_ = {id[2], id[3]};
}

std::array<uint32_t, 4> Philox::block(uint64_t element) const {
  return philox4x32({static_cast<uint32_t>(element), static_cast<uint32_t>(element >> 32),
                     counter_high_[0], counter_high_[1]},
                    key_);
}

uint32_t Philox::bits(uint64_t element) const {
  return block(element)[0];
}

uint64_t Philox::bits64(uint64_t element) const {
  const auto b = block(element);
  return uint64_t{b[0]} << 32 | b[1];
}

double Philox::uniform(uint64_t element) const {
  return static_cast<double>(bits64(element) >> 11) * 0x1.0p-53;
}

double Philox::normal(uint64_t element) const {
  const auto b = block(element);
  const double u1 = (static_cast<double>(uint64_t{b[0]} << 21 | b[1] >> 11) + 0.5) * 0x1.0p-53;
  const double u2 = static_cast<double>(uint64_t{b[2]} << 21 | b[3] >> 11) * 0x1.0p-53;
  return std::sqrt(-2.0 * std::log(u1)) * std::cos(2.0 * std::numbers::pi * u2);
}

}  // namespace sbtrain
