// Document stores. Their seal is made to fit, since otherwise nothing behind it would be reached.
#include <cstring>
#include <vector>

#include "core/sha256.h"
#include "data/document_store.h"
#include "fuzz/harness.h"

namespace {

// Of the last bytes of a store: where its tokens lie, and the checksums of all other bytes and of
// the seal itself.
void seal(std::string& bytes) {
  constexpr size_t kSeal = 96;
  if (bytes.size() < kSeal) return;
  const size_t at = bytes.size() - kSeal;
  const auto number = [&](size_t offset) {
    uint64_t value = 0;
    std::memcpy(&value, bytes.data() + at + offset, sizeof value);
    return value;
  };
  const auto put = [&](size_t offset, const std::string& text) {
    const sbtrain::Digest digest = sbtrain::sha256(text.data(), text.size());
    std::memcpy(bytes.data() + at + offset, digest.data(), digest.size());
  };
  const uint64_t begin = number(16);
  const uint64_t size = number(24);
  if (begin <= at && size <= at - begin) {
    put(32, bytes.substr(0, begin) + bytes.substr(begin + size, at - begin - size));
  }
  put(64, bytes.substr(at, 64));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sbtrain;
  std::string bytes(reinterpret_cast<const char*>(data), size);
  seal(bytes);
  const test::MemoryFile file(bytes);
  test::may_refuse([&] {
    const DocumentStore store(file.path().string());
    store.verify();
    store.verify_content();
  });
  return 0;
}
