// tiktoken's ranks. Lines for the 256 bytes are added, without which nothing is reached.
#include "fuzz/tokenizer_checks.h"
#include "tokenizer/tokenizer_files.h"

namespace {

const std::string& byte_lines() {
  static const std::string kLines = [] {
    constexpr std::string_view kDigits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string lines;
    for (size_t byte = 0; byte < 256; ++byte) {
      lines += {kDigits[byte >> 2], kDigits[(byte & 3) << 4], '=', '='};
      lines += " " + std::to_string(byte) + "\n";
    }
    return lines;
  }();
  return kLines;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace sbtrain;
  const std::string text(reinterpret_cast<const char*>(data), size);
  is_tiktoken(text);
  test::may_refuse([&] { read_tiktoken(text, "gpt2", "input.tiktoken"); });
  for (const bool special : {false, true}) {
    const char* encoding = special ? "llama3" : "gpt2";
    test::may_refuse([&] {
      test::check_bpe(read_tiktoken(byte_lines() + text, encoding, "input.tiktoken"), special);
    });
  }
  return 0;
}
