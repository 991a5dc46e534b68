// SHA-256 as bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace sbtrain {

using Digest = std::array<uint8_t, 32>;

// SHA-256 of a stream of bytes.
class DigestBuilder {
 public:
  DigestBuilder();
  void update(const void* data, size_t bytes);
  void update(std::string_view bytes) { update(bytes.data(), bytes.size()); }
  // The object starts over.
  Digest finish();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const noexcept;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

Digest digest_of(const void* data, size_t bytes);

// 64 lower-case hexadecimal digits.
std::string to_hex(const Digest& digest);

}  // namespace sbtrain
