// The files of a Hugging Face folder that hold the tokenizer.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace sbtrain {

struct HfTokenizer {
  std::map<std::string, std::string> texts;  // by file name
  int32_t bos = -1;                          // -1: none
  int32_t eos = -1;
  std::string hash;  // the fingerprint of the model file
};

struct HfTokenizerOptions {
  bool starts_with_bos = false;  // the documents of training began with bos, so prompts do too
  int64_t max_length = 0;        // of a text, in tokens
  int64_t vocab = 0;             // of the model
};

// The files for the tokenizer model at `path` and those that were kept with it. tiktoken's ranks
// come with a tokenizer.json of the same tokens, which transformers reads. Throws ExitCode::kData
// for a file that is no tokenizer, and kConfig for one with more pieces than the vocabulary.
HfTokenizer hf_tokenizer(const std::string& path, const HfTokenizerOptions& options);

}  // namespace sbtrain
