// tokenizer.json of a byte-level BPE; what follows a zero byte is the tokenizer_config.json beside
// it. The tokens of the 256 bytes are added to the vocabulary, without which nothing is reached.
#include <nlohmann/json.hpp>

#include "fuzz/tokenizer_checks.h"
#include "tokenizer/tokenizer_files.h"

namespace {

// The characters of GPT-2 for bytes, from the printable ones of Latin-1 and U+0100 on.
std::string with_bytes(const std::string& content) {
  nlohmann::json file = nlohmann::json::parse(content, nullptr, false);
  if (!file.is_object() || !file.contains("model") || !file["model"].is_object()) return content;
  nlohmann::json& vocabulary = file["model"]["vocab"];
  if (!vocabulary.is_object()) return content;
  const auto utf8 = [](int code) {
    if (code < 0x80) return std::string(1, static_cast<char>(code));
    return std::string{static_cast<char>(0xc0 | code >> 6),
                       static_cast<char>(0x80 | (code & 0x3f))};
  };
  int next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    vocabulary.emplace(utf8(printable ? byte : next), 1000 + byte);
    if (!printable) ++next;
  }
  return file.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sbtrain;
  const std::string text(reinterpret_cast<const char*>(data), size);
  const size_t zero = text.find('\0');
  const std::string content = text.substr(0, zero);
  const std::string settings = zero == std::string::npos ? "" : text.substr(zero + 1);
  test::may_refuse([&] { read_tokenizer_json(content, "tokenizer.json", {}); });
  for (const bool special : {false, true}) {
    test::may_refuse([&] {
      const TokenizerConfig config = read_tokenizer_config(settings, "tokenizer_config.json");
      test::check_bpe(read_tokenizer_json(with_bytes(content), "tokenizer.json", config), special);
    });
  }
  return 0;
}
