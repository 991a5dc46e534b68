// POST /v1/completions: from the JSON of a request to sequences for the engine, and from what they
// write to the JSON of the answer, whole or as a stream of server-sent events.
#pragma once

#include <chrono>
#include <string>

#include "serve/engine.h"
#include "serve/http_server.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {

struct CompletionContext {
  Engine& engine;
  const Tokenizer& tokenizer;
  bool starts_with_bos;
  std::string model_name;
  std::chrono::seconds time_limit;
};

// Waits for the whole answer, or for the first part of a stream. Drops the body once it has been
// read. Throws ApiError.
HttpResponse answer_completion(const CompletionContext& context, HttpRequest& request);

// The tokens of a prompt, which begin like the documents in training: with bos if those had it. An
// empty prompt without bos becomes eos, after which a new document begins in training. Empty if the
// tokenizer has neither.
std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, bool starts_with_bos,
                                   const std::string& prompt);

}  // namespace sbtrain
