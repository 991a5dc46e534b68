// Small tokenizers and document stores for the data tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/philox.h"
#include "data/document_store.h"
#include "support/process.h"
#include "text/text_input.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain::test {

// The exit code and message that `body` throws.
struct Thrown {
  ExitCode code = ExitCode::kDone;
  std::string message;
  bool says(const std::string& text) const { return message.find(text) != std::string::npos; }
};
inline Thrown thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {ExitCode::kDone, "nothing was thrown"};
}

using Documents = std::vector<std::vector<int32_t>>;

// `count` documents of `shortest` to `longest` tokens. With a large vocabulary nearly each token
// of a store is different, so that tests can tell which one they see.
inline Documents random_documents(uint64_t seed, int count, int64_t shortest, int64_t longest,
                                  int32_t vocab) {
  const Philox random(seed, RandomPurpose::kTest, "documents");
  Documents documents;
  uint64_t n = 0;
  for (int i = 0; i < count; ++i) {
    const auto span = static_cast<uint64_t>(longest - shortest + 1);
    std::vector<int32_t> tokens(static_cast<size_t>(shortest) + random.bits64(n++) % span);
    for (int32_t& token : tokens) {
      token = static_cast<int32_t>(random.bits64(n++) % static_cast<uint64_t>(vocab));
    }
    documents.push_back(std::move(tokens));
  }
  return documents;
}

// Tokens that are their own index in the store: 0, 1, 2, ...
inline Documents numbered_documents(const std::vector<int64_t>& lengths) {
  Documents documents;
  int32_t next = 0;
  for (const int64_t length : lengths) {
    documents.emplace_back();
    for (int64_t i = 0; i < length; ++i) documents.back().push_back(next++);
  }
  return documents;
}

inline StoreInfo write_store(const std::string& path, const Documents& documents, int64_t vocab,
                             const std::string& tokenizer_hash = "t") {
  StoreInfo format;
  format.vocab = vocab;
  format.tokenizer_hash = tokenizer_hash;
  format.bos = 1;
  format.eos = 2;
  DocumentWriter writer(path, format);
  for (const auto& document : documents) writer.append(document);
  return writer.finish({{.name = "test", .documents = 1, .tokens = 2, .text_bytes = 3}}, 4);
}

inline const std::string& english_path() {
  static const std::string kPath = std::string(SBTRAIN_TEST_DATA) + "/english.jsonl";
  return kPath;
}

inline std::vector<std::string> english_texts() {
  TextInput input({english_path()});
  std::vector<std::string> texts;
  for (RawDocument raw; input.next(raw);) texts.push_back(parse_document(std::move(raw)).text);
  return texts;
}

// Gives the texts one after another; `given` counts them.
inline NextText one_by_one(const std::vector<std::string>& texts, size_t& given) {
  return [&](std::string& text) {
    if (given == texts.size()) return false;
    text = texts[given++];
    return true;
  };
}

// Trains a tokenizer on the English text.
inline Tokenizer train_english(const std::string& path, int64_t vocab = 700) {
  const std::vector<std::string> texts = english_texts();
  size_t given = 0;
  train_tokenizer(one_by_one(texts, given), {.vocab = vocab}, path);
  return Tokenizer(path);
}

// Tests that share a folder and a tokenizer of the English text.
class EnglishTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<TemporaryFolder>();
    tokenizer_ = std::make_unique<Tokenizer>(train_english(*folder_ / "tokenizer.model"));
  }
  static void TearDownTestSuite() {
    tokenizer_.reset();
    folder_.reset();
  }
  static std::string path(const std::string& name) { return *folder_ / name; }
  static const Tokenizer& tokenizer() { return *tokenizer_; }

 private:
  static inline std::unique_ptr<TemporaryFolder> folder_;
  static inline std::unique_ptr<Tokenizer> tokenizer_;
};

}  // namespace sbtrain::test
