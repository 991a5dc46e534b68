// SHA-256 (FIPS 180-4), by OpenSSL.
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

// The digest of a stream of bytes.
class Sha256 {
 public:
  Sha256();
  void update(const void* data, size_t bytes);
  void update(std::string_view bytes) { update(bytes.data(), bytes.size()); }
  // The digest of all bytes so far; the object then starts anew.
  Digest finish();
  std::string hex();  // finish() as 64 lower-case hexadecimal digits

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const noexcept;
  };
  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

Digest sha256(const void* data, size_t bytes);
std::string sha256_hex(std::string_view bytes);
std::string to_hex(const Digest& digest);

}  // namespace sbtrain
