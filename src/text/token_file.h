// Files of token ids that other trainers prepare: llm.c's .bin, with a header, and nanoGPT's,
// without.
//
// llm.c (dev/data/data_common.py): 256 int32 (magic, version, number of tokens, zeros), then the
// tokens; each document starts with an end-of-text token. nanoGPT (data/openwebtext/prepare.py):
// nothing but uint16; each document ends with an end-of-text token. All numbers are little-endian.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include "text/byte_source.h"
#include "text/document.h"

namespace sbtrain {

inline constexpr int kNanoGptTokenBytes = 2;

// What llm.c's header says of the tokens.
struct LlmCModel {
  int32_t magic;
  int32_t version;
  int token_bytes;
  int32_t vocab;        // of the tokenizer that llm.c uses with this header
  int32_t end_of_text;  // the token between documents
};

// The model of a file that begins with `head`; null if that is not a header of llm.c's tokens.
const LlmCModel* llmc_model(std::string_view head);

// Documents (kTokens) are what lies between tokens `end_of_text`, which belong to none of them;
// those without tokens are left out. With an `end_of_text` of -1 the file is one document.
// Documents of more than 256 KiB come in parts. `model` is null for nanoGPT. `origin` has to live
// as long as the reader and its documents. next() throws ExitCode::kData for a file that ends
// inside of a token, or that has not as many tokens as its header says.
std::unique_ptr<RecordReader> read_tokens(std::unique_ptr<ByteSource> source,
                                          const DocumentOrigin& origin, const LlmCModel* model,
                                          int64_t end_of_text);

}  // namespace sbtrain
