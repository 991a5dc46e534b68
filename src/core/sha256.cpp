#include "core/sha256.h"

#include <openssl/evp.h>

#include <iterator>

#include "core/error.h"

namespace sbtrain {
namespace {

void check(int ok) {
  require(ok == 1, "OpenSSL: SHA-256 failed");
}

}  // namespace

void Sha256::Free::operator()(evp_md_ctx_st* context) const noexcept {
  EVP_MD_CTX_free(context);
}

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  require(context_ != nullptr, "OpenSSL: no memory for a SHA-256 context");
  check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
}

void Sha256::update(const void* data, size_t bytes) {
  check(EVP_DigestUpdate(context_.get(), data, bytes));
}

Digest Sha256::finish() {
  Digest digest{};
  check(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
  check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
  return digest;
}

std::string Sha256::hex() {
  return to_hex(finish());
}

Digest sha256(const void* data, size_t bytes) {
  Digest digest{};
  check(EVP_Digest(data, bytes, digest.data(), nullptr, EVP_sha256(), nullptr));
  return digest;
}

std::string sha256_hex(std::string_view bytes) {
  return to_hex(sha256(bytes.data(), bytes.size()));
}

std::string to_hex(const Digest& digest) {
  std::string hex;
  hex.reserve(2 * digest.size());
  for (const uint8_t byte : digest) hex += fmt::format("{:02x}", byte);
  return hex;
}

}  // namespace sbtrain
