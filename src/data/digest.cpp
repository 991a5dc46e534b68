#include "data/digest.h"

#include <openssl/evp.h>

#include "core/error.h"

namespace sbtrain {
namespace {

void check(int ok) {
  require(ok == 1, "OpenSSL: SHA-256 failed");
}

}  // namespace

void DigestBuilder::Free::operator()(evp_md_ctx_st* context) const noexcept {
  EVP_MD_CTX_free(context);
}

DigestBuilder::DigestBuilder() : context_(EVP_MD_CTX_new()) {
  require(context_ != nullptr, "OpenSSL: no memory for a SHA-256 context");
  check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
}

void DigestBuilder::update(const void* data, size_t bytes) {
  check(EVP_DigestUpdate(context_.get(), data, bytes));
}

Digest DigestBuilder::finish() {
  Digest digest{};
  check(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
  check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
  return digest;
}

Digest digest_of(const void* data, size_t bytes) {
  Digest digest{};
  check(EVP_Digest(data, bytes, digest.data(), nullptr, EVP_sha256(), nullptr));
  return digest;
}

std::string to_hex(const Digest& digest) {
  std::string hex;
  hex.reserve(2 * digest.size());
  for (const uint8_t byte : digest) fmt::format_to(std::back_inserter(hex), "{:02x}", byte);
  return hex;
}

}  // namespace sbtrain
