#include "core/philox.h"

namespace sbtrain {

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> c, std::array<uint32_t, 2> k) {
  const auto out = kernels::philox4x32({{c[0], c[1], c[2], c[3]}}, {{k[0], k[1]}});
  return {out.x[0], out.x[1], out.x[2], out.x[3]};
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
  return kernels::philox_normal(stream(), element);
}

}  // namespace sbtrain
