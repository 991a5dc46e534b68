#include "serve/completion_request.h"

#include <algorithm>
#include <limits>
#include <map>
#include <random>

#include "core/utf8.h"
#include "serve/completion_text.h"

namespace sbtrain {
namespace {

constexpr int64_t kMostTopLogprobs = 20;
constexpr int64_t kMostLogprobs = int64_t{1} << 20;  // in the lists of one answer
constexpr size_t kMostStops = 16;
constexpr size_t kLongestStop = 1024;
constexpr size_t kMostStopTokens = 64;  // fewer than a tokenizer has, so that others can be drawn

Prompt prompt_of_text(const CompletionContext& context, const std::string& text) {
  Prompt prompt{prompt_tokens(context.tokenizer, context.starts_with_bos, text), text, "", true};
  if (prompt.tokens.empty()) {
    throw ApiError{400, "the prompt is empty, and the tokenizer has no token to begin with",
                   "prompt"};
  }
  return prompt;
}

Prompt prompt_of_ids(const CompletionContext& context, const nlohmann::json& ids) {
  Prompt prompt{token_ids(ids, context.tokenizer, "prompt"), "", "", false};
  if (prompt.tokens.empty()) throw ApiError{400, "the prompt has no tokens", "prompt"};
  const std::string bytes = context.tokenizer.decode(prompt.tokens);
  const size_t complete = complete_length(bytes);
  prompt.text = valid_utf8(std::string_view(bytes).substr(0, complete));
  prompt.open = bytes.substr(complete);
  return prompt;
}

// A text, a list of ids, or a list of either.
std::vector<Prompt> read_prompts(const CompletionContext& context, const RequestFields& fields) {
  if (!fields.has("prompt")) return {prompt_of_text(context, "")};
  const nlohmann::json& json = fields.value("prompt");
  if (json.is_string()) return {prompt_of_text(context, json.get<std::string>())};
  if (!json.is_array() || json.empty()) {
    throw ApiError{400, "'prompt' must be a text, a list of token ids, or a list of these",
                   "prompt"};
  }
  if (json.front().is_number()) return {prompt_of_ids(context, json)};
  if (static_cast<int64_t>(json.size()) > context.engine.waiting_limit()) {
    throw ApiError{400,
                   fmt::format("{} prompts are more than the server queues, {}", json.size(),
                               context.engine.waiting_limit()),
                   "prompt"};
  }
  std::vector<Prompt> prompts;
  for (const nlohmann::json& one : json) {
    prompts.push_back(one.is_string() ? prompt_of_text(context, one.get<std::string>())
                                      : prompt_of_ids(context, one));
  }
  return prompts;
}

// Fields of this and of other servers that change the text in ways that do not exist here, with the
// values that change nothing; null never does.
const std::map<std::string, std::vector<nlohmann::json>, std::less<>>& unsupported() {
  using List = nlohmann::json::array_t;
  static const nlohmann::json kNoList = List{};
  static const nlohmann::json kNoObject = nlohmann::json::object();
  static const nlohmann::json kPlainText = {{"type", "text"}};
  static const std::map<std::string, std::vector<nlohmann::json>, std::less<>> fields = {
      // OpenAI's
      {"suffix", {""}},
      {"presence_penalty", {0}},
      {"frequency_penalty", {0}},
      {"logit_bias", {kNoObject, kNoList}},
      {"response_format", {kPlainText}},
      {"messages", {}},
      {"max_completion_tokens", {}},
      // vLLM's
      {"use_beam_search", {false}},
      {"length_penalty", {1}},
      {"early_stopping", {false}},
      {"bad_words", {kNoList}},
      {"allowed_token_ids", {}},
      {"logits_processors", {kNoList}},
      {"structured_outputs", {}},
      {"structural_tag", {}},
      {"prompt_embeds", {}},
      {"truncate_prompt_tokens", {}},
      {"include_stop_str_in_output", {false}},
      {"skip_special_tokens", {true}},
      {"spaces_between_special_tokens", {true}},
      {"add_special_tokens", {true}},
      // those of transformers and of servers in its words
      {"max_new_tokens", {}},
      {"min_new_tokens", {0}},
      {"max_length", {}},
      {"min_length", {0}},
      {"num_beams", {1}},
      {"num_beam_groups", {1}},
      {"diversity_penalty", {0}},
      {"penalty_alpha", {0}},
      {"no_repeat_ngram_size", {0}},
      {"encoder_repetition_penalty", {1}},
      {"bad_words_ids", {kNoList}},
      {"typical_p", {1}},
      {"epsilon_cutoff", {0}},
      {"eta_cutoff", {0}},
      {"top_a", {0}},
      {"watermark", {false}},
      {"stop_sequences", {kNoList}},
      {"stop_strings", {kNoList}},
      {"eos_token_id", {}},
      {"suppress_tokens", {kNoList}},
      {"begin_suppress_tokens", {kNoList}},
      {"sequence_bias", {kNoObject, kNoList}},
      {"forced_bos_token_id", {}},
      {"forced_eos_token_id", {}},
      {"force_words_ids", {kNoList}},
      {"constraints", {kNoList}},
      {"encoder_no_repeat_ngram_size", {0}},
      {"exponential_decay_length_penalty", {}},
      {"guidance_scale", {1}},
      {"num_return_sequences", {1}},
      {"max_time", {}},
      {"dola_layers", {}},
      {"top_h", {}},
      {"token_healing", {false}},
      {"watermarking_config", {}},
      // SGLang's
      {"regex", {""}},
      {"ebnf", {""}},
      {"stop_regex", {"", kNoList}},
      {"no_stop_trim", {false}},
      {"custom_logit_processor", {""}},
      // llama.cpp's
      {"n_predict", {}},
      {"repeat_penalty", {1}},
      {"grammar", {""}},
      {"json_schema", {}},
      {"tfs_z", {1}},
      {"mirostat", {0}},
      {"dynatemp_range", {0}},
      {"dry_multiplier", {0}},
      {"xtc_probability", {0}},
      {"samplers", {}},
      {"n_indent", {0}},
      {"t_max_predict_ms", {0, -1}}};
  return fields;
}

// Fields that change the text in a way that does not exist here are refused by name, unless they
// have a value that changes nothing.
void refuse_unsupported(const RequestFields& fields, int64_t n) {
  const auto refuse = [](const std::string& name) {
    throw ApiError{400, fmt::format("'{}' is not supported", name), name};
  };
  for (const auto& [name, value] : fields.all()) {
    if (value.is_null()) continue;
    const auto found = unsupported().find(name);
    const bool refused = found != unsupported().end()
                             ? std::ranges::count(found->second, value) == 0
                             : name.starts_with("guided_");
    if (refused) refuse(name);
  }
  if (fields.integer("best_of", n, 1, 1 << 20) != n) refuse("best_of");
  // Words for the likeliest tokens, which is what temperature 0 asks for.
  if (!fields.boolean("do_sample", true) && fields.number("temperature", 1, 0, 100) != 0) {
    refuse("do_sample");
  }
}

void check_lengths(const CompletionContext& context, const CompletionRequest& request) {
  const int64_t capacity = context.engine.capacity();
  for (const Prompt& prompt : request.prompts) {
    const auto length = static_cast<int64_t>(prompt.tokens.size());
    if (length + request.sampling.max_tokens <= capacity) continue;
    throw ApiError{400,
                   fmt::format("the server's context has {} tokens; the prompt has {}, and "
                               "max_tokens asks for {} more",
                               capacity, length, request.sampling.max_tokens),
                   "prompt"};
  }
  const auto sequences = static_cast<int64_t>(request.prompts.size()) * request.n;
  if (sequences > context.engine.waiting_limit()) {
    throw ApiError{400,
                   fmt::format("{} completions are more than the server queues, {}", sequences,
                               context.engine.waiting_limit()),
                   "n"};
  }
}

// Each logprob takes memory several times over, as a number with its token's name, as JSON and as
// text; the lists of one request must not take all that there is. check_lengths has bounded the
// factors.
void check_logprobs(const CompletionRequest& request) {
  if (!request.logprobs) return;
  int64_t shown = 0;
  for (const Prompt& prompt : request.prompts) {
    if (request.echo) shown += static_cast<int64_t>(prompt.tokens.size());
    shown += request.sampling.max_tokens;
  }
  const int64_t entries = shown * request.n * (1 + request.top_logprobs);
  if (entries <= kMostLogprobs) return;
  throw ApiError{400,
                 fmt::format("the completions may have {} logprobs together, more than an answer "
                             "holds, {}; ask for fewer prompts, n, max_tokens or logprobs",
                             entries, kMostLogprobs),
                 "logprobs"};
}

// What ends a completion before max_tokens.
void read_stops(const CompletionContext& context, const RequestFields& fields,
                CompletionRequest& request) {
  request.stops = fields.texts("stop");
  if (request.stops.size() > kMostStops) {
    throw ApiError{400, fmt::format("'stop' must have {} strings at most", kMostStops), "stop"};
  }
  for (const std::string& stop : request.stops) {
    if (stop.empty() || stop.size() > kLongestStop) {
      throw ApiError{400, fmt::format("each 'stop' must have 1 to {} bytes", kLongestStop), "stop"};
    }
  }
  if (fields.has("stop_token_ids")) {
    request.stop_tokens =
        token_ids(fields.value("stop_token_ids"), context.tokenizer, "stop_token_ids");
  }
  if (request.stop_tokens.size() > kMostStopTokens) {
    throw ApiError{400, fmt::format("'stop_token_ids' must have {} ids at most", kMostStopTokens),
                   "stop_token_ids"};
  }
  if (!fields.boolean("ignore_eos", false) && context.tokenizer.eos() >= 0) {
    request.stop_tokens.push_back(context.tokenizer.eos());
  }
}

}  // namespace

CompletionRequest read_request(const CompletionContext& context, const RequestFields& fields) {
  CompletionRequest request;
  const int64_t most = context.engine.capacity();
  request.n = fields.integer("n", 1, 1, context.engine.waiting_limit());
  refuse_unsupported(fields, request.n);
  request.echo = fields.boolean("echo", false);
  request.logprobs = fields.has("logprobs");
  request.top_logprobs = fields.integer("logprobs", 0, 0, kMostTopLogprobs);
  request.stream = fields.boolean("stream", false);
  if (fields.has("stream_options")) {
    const nlohmann::json& options = fields.value("stream_options");
    const auto usage = options.is_object() ? options.find("include_usage") : options.end();
    const bool given = usage != options.end() && !usage->is_null();
    if (!options.is_object() || (given && !usage->is_boolean())) {
      throw ApiError{400, "'stream_options' must be like {\"include_usage\": true}",
                     "stream_options"};
    }
    request.stream_usage = given && usage->get<bool>();
  }
  read_stops(context, fields, request);
  request.sampling = {.max_tokens = fields.integer("max_tokens", 16, request.echo ? 0 : 1, most),
                      .temperature = fields.number("temperature", 1, 0, 100),
                      .top_k = std::max<int64_t>(0, fields.integer("top_k", 0, -1, 1 << 30)),
                      .top_p = fields.number("top_p", 1, 0, 1),
                      .min_p = fields.number("min_p", 0, 0, 1),
                      .seed = random_seed(),
                      .vocab = context.tokenizer.size()};
  request.min_tokens = fields.integer("min_tokens", 0, 0, request.sampling.max_tokens);
  request.repetition_penalty = fields.number("repetition_penalty", 1, 0.01, 100);
  if (fields.has("seed")) {
    request.sampling.seed = static_cast<uint64_t>(fields.integer(
        "seed", 0, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()));
  }
  request.prompts = read_prompts(context, fields);
  check_lengths(context, request);
  check_logprobs(request);
  return request;
}

uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

}  // namespace sbtrain
