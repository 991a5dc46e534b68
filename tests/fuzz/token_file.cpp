// Files of token ids, llm.c's with a header and nanoGPT's without one. The first byte chooses the
// token between documents. No token may be lost, and none may be made up.
#include "text/token_file.h"

#include <cstdlib>
#include <cstring>

#include "fuzz/harness.h"

namespace {

using namespace sbtrain;  // NOLINT: the harness is this file alone

class StringSource : public ByteSource {
 public:
  explicit StringSource(std::string_view text) : text_(text) {}
  size_t read(char* out, size_t bytes) override {
    const size_t count = std::min(bytes, text_.size());
    std::memcpy(out, text_.data(), count);
    text_.remove_prefix(count);
    return count;
  }

 private:
  std::string_view text_;
};

constexpr size_t kHeaderBytes = 1024;

void read(std::string_view file, const LlmCModel* model, int64_t end_of_text) {
  const DocumentOrigin origin{.name = "input", .source = "input", .keys = {}};
  const auto width = static_cast<size_t>(model ? model->token_bytes : kNanoGptTokenBytes);
  const std::string_view tokens = model ? file.substr(std::min(kHeaderBytes, file.size())) : file;
  std::string expected;
  for (size_t at = 0; at + width <= tokens.size(); at += width) {
    uint32_t token = 0;
    std::memcpy(&token, tokens.data() + at, width);
    if (int64_t{token} != end_of_text) expected += tokens.substr(at, width);
  }
  test::may_refuse([&] {
    const auto reader =
        read_tokens(std::make_unique<StringSource>(file), origin, model, end_of_text);
    std::string found;
    RawDocument document;
    while (reader->next(document)) {
      if (document.data.empty() || document.data.size() % width != 0) std::abort();
      found += document.data;
    }
    if (found != expected) std::abort();
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view file(reinterpret_cast<const char*>(data) + 1, size - 1);
  const int64_t end_of_text = int64_t{data[0]} - 1;
  if (const LlmCModel* model = llmc_model(file)) read(file, model, end_of_text);
  read(file, nullptr, end_of_text);
  return 0;
}
