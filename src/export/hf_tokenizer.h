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
};

// The files for the tokenizer model at `path` and those that were kept with it. `starts_with_bos`:
// the documents of training began with bos, so prompts do too. `max_length` is the longest text of
// the model, in tokens. Throws ExitCode::kData for a file that is no tokenizer.
HfTokenizer hf_tokenizer(const std::string& path, bool starts_with_bos, int64_t max_length);

}  // namespace sbtrain
