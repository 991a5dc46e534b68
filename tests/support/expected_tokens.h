// Compares tokenizers with what their own libraries made of the same text
// (tests/unit/tokenizer/tokenizer_reference.py).
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/utf8.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain::test {

// Python's bytes.decode("utf-8", "replace"): each invalid sequence, as far as it could have been
// the start of a character, becomes U+FFFD.
inline std::string replace_invalid(std::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  std::string text;
  while (!bytes.empty()) {
    const size_t length = character_length(bytes);
    if (length > 0) {
      text += bytes.substr(0, length);
      bytes.remove_prefix(length);
      continue;
    }
    text += "\xef\xbf\xbd";
    size_t bad = 1;
    const uint8_t lead = byte(0);
    const size_t wanted = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    while (lead >= 0xc2 && lead <= 0xf4 && bad < wanted && bad < bytes.size() &&
           (byte(bad) & 0xc0) == 0x80) {
      const bool overlong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90);
      const bool beyond = (lead == 0xed && byte(1) >= 0xa0) || (lead == 0xf4 && byte(1) >= 0x90);
      if (overlong || beyond) break;
      ++bad;
    }
    bytes.remove_prefix(bad);
  }
  return text;
}

// Expects the tokens of every text in folder/expected.jsonl, and their decoded text. Returns the
// number of texts.
inline int64_t expect_tokens(const std::filesystem::path& folder) {
  const std::string path = find_tokenizer(folder.string());
  const Tokenizer plain(path);
  const Tokenizer special(path, {.special = true});
  std::ifstream file(folder / "expected.jsonl");
  int64_t texts = 0;
  int wrong = 0;
  for (std::string line; std::getline(file, line) && wrong < 5; ++texts) {
    const auto expected = nlohmann::json::parse(line);
    const auto text = expected["text"].get<std::string>();
    const auto ids = expected["ids"].get<std::vector<int32_t>>();
    const bool same = plain.encode(text) == ids &&
                      special.encode(text) == expected["special"].get<std::vector<int32_t>>() &&
                      replace_invalid(plain.decode(ids)) == expected["decoded"].get<std::string>();
    if (same) continue;
    ++wrong;
    ADD_FAILURE() << path << ", text " << texts << ": " << line.substr(0, 2000) << "\n  plain   "
                  << nlohmann::json(plain.encode(text)) << "\n  special "
                  << nlohmann::json(special.encode(text)) << "\n  decoded "
                  << nlohmann::json(replace_invalid(plain.decode(ids)));
  }
  return texts;
}

}  // namespace sbtrain::test
