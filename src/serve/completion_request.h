// A request to /v1/completions, as its client has written it, checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serve/api_request.h"
#include "serve/completions.h"
#include "serve/sampling.h"

namespace sbtrain {

struct Prompt {
  std::vector<int32_t> tokens;
  std::string text;        // without a character at its end whose last bytes are missing
  std::string open;        // the bytes of that character, which a completion may end
  bool has_names = false;  // a text, in which special tokens are written by their names
};

struct CompletionRequest {
  std::vector<Prompt> prompts;
  SamplingOptions sampling;
  int64_t n = 1;
  bool echo = false;
  bool logprobs = false;
  int64_t top_logprobs = 0;
  bool stream = false;
  bool stream_usage = false;
  std::vector<std::string> stops;
  std::vector<int32_t> stop_tokens;
  int64_t min_tokens = 0;
  double repetition_penalty = 1;
};

// Throws ApiError for what is wrong in a field, for fields that change the text in a way that does
// not exist here, and for more than the engine's context or queue holds.
CompletionRequest read_request(const CompletionContext& context, const RequestFields& fields);

// Drawn anew by each call.
uint64_t random_seed();

}  // namespace sbtrain
