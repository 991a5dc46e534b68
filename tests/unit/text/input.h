// Text files, and the stores that `sbtrain prepare` makes of them.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "data/prepare.h"
#include "unit/data/stores.h"

namespace sbtrain::test {

inline std::string utf8(const char8_t* text) {
  return reinterpret_cast<const char*>(text);
}

class InputTest : public EnglishTest {
 protected:
  // Texts with everything that a format might change.
  static std::vector<std::string> texts() {
    using namespace std::string_literals;
    std::vector<std::string> texts = english_texts();
    texts.push_back(utf8(u8"caf\u00e9 \u4e2d\u6587 \U0001f600\r\n\ttab\u0000nul "s.c_str()));
    texts.push_back("a\0b"s);
    texts.push_back("{\"text\": \"JSON in text\"}");
    return texts;
  }

  static std::string json_lines(const std::vector<std::string>& texts) {
    std::string lines;
    for (const std::string& text : texts) lines += nlohmann::json{{"text", text}}.dump() + "\n";
    return lines;
  }

  // The store of the file, as bytes.
  static std::string store_of(const std::string& file, PrepareOptions options = {},
                              bool with_tokenizer = true) {
    options.inputs = {file};
    options.output = path("store.h5");
    prepare_documents(options, with_tokenizer ? &tokenizer() : nullptr, {});
    return read_file(options.output);
  }

  static Thrown refusal(const std::string& file, PrepareOptions options = {},
                        bool with_tokenizer = true) {
    std::filesystem::remove(path("store.h5"));
    Thrown error = thrown_by([&] { store_of(file, std::move(options), with_tokenizer); });
    EXPECT_FALSE(std::filesystem::exists(path("store.h5")) ||
                 std::filesystem::exists(path("store.h5.tmp")))
        << file;
    return error;
  }
  static Thrown refusal_of(const std::string& name, const std::string& content,
                           const PrepareOptions& options = {}) {
    write_file(path(name), content);
    Thrown error = refusal(path(name), options);
    EXPECT_TRUE(error.says(name)) << error.message;
    std::filesystem::remove(path(name));
    return error;
  }

  template <typename Token>
  static std::string token_bytes(const std::vector<Token>& tokens) {
    return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token)};
  }
  static std::string llmc_header(int32_t magic, int32_t version, size_t tokens) {
    std::vector<int32_t> header(256);
    header[0] = magic;
    header[1] = version;
    header[2] = static_cast<int32_t>(tokens);
    return token_bytes(header);
  }
};

}  // namespace sbtrain::test
