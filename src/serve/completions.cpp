#include "serve/completions.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <span>

#include "core/error.h"
#include "core/utf8.h"
#include "serve/api_request.h"
#include "serve/completion_text.h"

namespace sbtrain {
namespace {

// How often a thread that waits for tokens looks whether its client is still there.
constexpr std::chrono::milliseconds kGlance{100};

constexpr int64_t kMostTopLogprobs = 20;
constexpr int64_t kMostLogprobs = int64_t{1} << 20;  // in the lists of one answer
constexpr size_t kMostStops = 16;
constexpr size_t kLongestStop = 1024;
constexpr size_t kMostStopTokens = 64;  // fewer than a tokenizer has, so that others can be drawn

struct Prompt {
  std::vector<int32_t> tokens;
  std::string text;        // without a character at its end whose last bytes are missing
  std::string open;        // the bytes of that character, which a completion may end
  bool has_names = false;  // a text, in which special tokens are written by their names
};

// A request as its client has written it, checked.
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

uint64_t random_seed() {
  std::random_device device;
  return (static_cast<uint64_t>(device()) << 32) | device();
}

// ---- The request --------------------------------------------------------------------------------

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

// ---- What the engine writes ---------------------------------------------------------------------

// One completion of one prompt, as far as it has come.
struct Choice {
  Choice(const Tokenizer& tokenizer, const std::vector<std::string>& stops)
      : text(tokenizer, stops) {}
  CompletionText text;
  std::string ready;                   // text that is to be shown
  std::vector<TokenLogprob> logprobs;  // that are to be shown
  bool at_prompt = true;               // what is to be shown begins with the prompt
  int64_t drawn = 0;
  bool finished = false;
  FinishReason reason = FinishReason::kFailed;
};

// The completions of one request: the engine's thread writes them, that of the connection reads.
class Completion {
 public:
  Completion(const Tokenizer& tokenizer, const CompletionRequest& request)
      : stream_(request.stream) {
    const size_t count = request.prompts.size() * static_cast<size_t>(request.n);
    for (size_t i = 0; i < count; ++i) {
      choices_.emplace_back(tokenizer, request.stops);
      if (!request.echo) continue;
      choices_.back().text.begin(request.prompts[i / static_cast<size_t>(request.n)].open);
    }
  }

  // Calls read(choices) under the lock once some choice has something new, or after a glance.
  template <typename Read>
  auto wait_and(const Read& read) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kGlance, [this] { return news_; });
    news_ = false;
    return read(choices_);
  }

  bool wanted() const { return wanted_; }
  void leave() { wanted_ = false; }

  // Calls change(choice) under the lock. `last`: nothing follows for this choice.
  template <typename Change>
  auto change(size_t index, bool last, const Change& change) {
    const std::lock_guard lock(mutex_);
    // Whoever reads whole answers is not woken up for each token.
    if (stream_ || last) {
      news_ = true;
      changed_.notify_all();
    }
    return change(choices_[index]);
  }

 private:
  const bool stream_;
  std::atomic<bool> wanted_ = true;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool news_ = false;
  std::vector<Choice> choices_;
};

class Listener : public SequenceListener {
 public:
  Listener(std::shared_ptr<Completion> completion, size_t index, const CompletionRequest& request)
      : completion_(std::move(completion)),
        index_(index),
        logprobs_(request.logprobs),
        min_tokens_(request.min_tokens) {}

  bool wanted() const override { return completion_->wanted(); }
  void on_prompt(std::vector<TokenLogprob> tokens) override {
    completion_->change(index_, false,
                        [&](Choice& choice) { choice.logprobs = std::move(tokens); });
  }
  bool on_token(const TokenLogprob& token, bool is_stop_token) override {
    return completion_->change(index_, false, [&](Choice& choice) {
      ++choice.drawn;
      if (logprobs_) choice.logprobs.push_back(token);
      const bool goes_on =
          is_stop_token || choice.text.add(token.token, choice.drawn > min_tokens_);
      choice.ready += choice.text.take();
      return goes_on;
    });
  }
  void on_finish(FinishReason reason) override {
    completion_->change(index_, true, [&](Choice& choice) {
      choice.ready += choice.text.take_rest();
      choice.finished = true;
      choice.reason = reason;
    });
  }

 private:
  std::shared_ptr<Completion> completion_;
  size_t index_;
  bool logprobs_;
  int64_t min_tokens_;
};

// ---- The answer ---------------------------------------------------------------------------------

int64_t characters(std::string_view bytes) {
  return std::count_if(bytes.begin(), bytes.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; });
}

// What each token of a prompt is in its text. The name of a special token may stand there, but that
// of a bos which the prompt was given does not.
std::vector<std::string_view> parts_of(const Tokenizer& tokenizer, const Prompt& prompt) {
  std::vector<std::string_view> parts;
  std::string_view rest = prompt.text;
  for (const int32_t token : prompt.tokens) {
    std::string_view part = tokenizer.bytes(token);
    if (part.empty() && prompt.has_names) {
      const std::string name = special_name(tokenizer, token);
      if (rest.starts_with(name)) part = rest.substr(0, name.size());
    }
    rest.remove_prefix(std::min(part.size(), rest.size()));
    parts.push_back(part);
  }
  return parts;
}

// OpenAI's lists for the tokens of one choice, the first of which are `prompt`, as parts_of has
// them. `offsets` has counted those before.
Json logprobs_json(const Tokenizer& tokenizer, const std::vector<TokenLogprob>& tokens,
                   std::span<const std::string_view> prompt, CharacterOffsets& offsets) {
  Json json = {{"tokens", Json::array()},
               {"token_logprobs", Json::array()},
               {"top_logprobs", Json::array()},
               {"text_offset", Json::array()}};
  bool follows_nothing = !prompt.empty();
  for (const TokenLogprob& token : tokens) {
    std::string_view bytes = tokenizer.bytes(token.token);
    if (!prompt.empty()) {
      bytes = prompt.front();
      prompt = prompt.subspan(1);
    }
    const std::string name = token_name(tokenizer, token.token);
    json["tokens"].push_back(name);
    json["text_offset"].push_back(offsets.add(bytes));
    if (std::exchange(follows_nothing, false)) {
      json["token_logprobs"].push_back(nullptr);
      json["top_logprobs"].push_back(nullptr);
      continue;
    }
    json["token_logprobs"].push_back(token.logprob);
    // Tokens of one name share an entry: the likeliest has it.
    Json top = Json::object();
    for (const auto& [id, logprob] : token.top) {
      const std::string other = token_name(tokenizer, id);
      if (!top.contains(other)) top[other] = logprob;
    }
    if (!top.contains(name)) top[name] = token.logprob;
    json["top_logprobs"].push_back(std::move(top));
  }
  return json;
}

// Throws for sequences that have not been continued to their end.
void check_reason(FinishReason reason, std::chrono::seconds limit) {
  if (reason == FinishReason::kExpired) {
    throw ApiError{504, fmt::format("the request has taken more than {} s", limit.count()), ""};
  }
  if (reason == FinishReason::kNoRoom) {
    throw ApiError{503,
                   "the server's cache is full: the texts that are being continued keep more keys "
                   "than it was started for; ask again later",
                   ""};
  }
  if (reason == FinishReason::kFailed || reason == FinishReason::kLeft) {
    throw ApiError{503, "the server is ending", ""};
  }
}

class Answer {
 public:
  Answer(const CompletionContext& context, CompletionRequest request)
      : context_(context),
        request_(std::move(request)),
        completion_(std::make_shared<Completion>(context.tokenizer, request_)),
        offsets_(request_.prompts.size() * static_cast<size_t>(request_.n)),
        told_(offsets_.size()),
        id_(fmt::format("cmpl-{:016x}", random_seed())),
        created_(std::chrono::duration_cast<std::chrono::seconds>(
                     std::chrono::system_clock::now().time_since_epoch())
                     .count()) {
    for (size_t i = 0; i < offsets_.size(); ++i) {
      if (request_.echo) continue;
      offsets_[i] =
          CharacterOffsets(characters(prompt(i).text) + characters(valid_utf8(prompt(i).open)));
    }
    submit();
  }
  ~Answer() {
    completion_->leave();
    context_.engine.wake();
  }
  Answer(const Answer&) = delete;
  Answer& operator=(const Answer&) = delete;

  // Waits for all choices. Throws ApiError.
  HttpResponse whole(const std::function<bool()>& left) {
    while (true) {
      const auto response =
          completion_->wait_and([&](std::vector<Choice>& choices) -> std::optional<HttpResponse> {
            if (!std::ranges::all_of(choices, &Choice::finished)) return std::nullopt;
            return json_response(whole_json(choices));
          });
      if (response) return *response;
      // 499 is what servers log for a client that has left; nobody reads it.
      if (left()) throw ApiError{499, "the client has left", ""};
    }
  }

  // The next events of a stream. Returns false after the last.
  bool next_events(std::string& events, const std::function<bool()>& left) {
    return completion_->wait_and([&](std::vector<Choice>& choices) {
      bool all_told = true;
      int64_t drawn = 0;
      for (size_t i = 0; i < choices.size(); ++i) {
        add_event(events, i, choices[i]);
        all_told = all_told && told_[i];
        drawn += choices[i].drawn;
      }
      if (!all_told) return !left();
      if (request_.stream_usage) {
        Json json = head();
        json["choices"] = Json::array();
        json["usage"] = usage(drawn);
        events += event(json);
      }
      events += "data: [DONE]\n\n";
      return false;
    });
  }

 private:
  const Prompt& prompt(size_t choice) const {
    return request_.prompts[choice / static_cast<size_t>(request_.n)];
  }

  void submit() {
    std::vector<Engine::Submission> submissions;
    for (size_t i = 0; i < offsets_.size(); ++i) {
      SequenceRequest sequence = {.prompt = prompt(i).tokens,
                                  .sampling = request_.sampling,
                                  .repetition_penalty = request_.repetition_penalty,
                                  .stop_tokens = request_.stop_tokens,
                                  .min_tokens = request_.min_tokens,
                                  .prompt_logprobs = request_.echo && request_.logprobs,
                                  .top_logprobs = request_.top_logprobs,
                                  .logprobs = request_.logprobs,
                                  .deadline = ServeClock::now() + context_.time_limit};
      // Completions of one prompt differ; those of different prompts are what each would be alone.
      sequence.sampling.seed += i % static_cast<size_t>(request_.n);
      submissions.push_back(
          {std::move(sequence), std::make_shared<Listener>(completion_, i, request_)});
    }
    switch (context_.engine.submit(std::move(submissions))) {
      case Engine::Admission::kAccepted:
        return;
      case Engine::Admission::kFull:
        throw ApiError{429, "too many requests are waiting; try again later", ""};
      case Engine::Admission::kClosed:
        throw ApiError{503, "the server is ending", ""};
    }
  }

  Json whole_json(std::vector<Choice>& choices) {
    Json list = Json::array();
    int64_t drawn = 0;
    for (size_t i = 0; i < choices.size(); ++i) {
      check_reason(choices[i].reason, context_.time_limit);
      list.push_back(choice_json(i, choices[i]));
      drawn += choices[i].drawn;
    }
    Json json = head();
    json["choices"] = std::move(list);
    json["usage"] = usage(drawn);
    return json;
  }

  Json head() const {
    return {{"id", id_},
            {"object", "text_completion"},
            {"created", created_},
            {"model", context_.model_name}};
  }

  Json usage(int64_t drawn) const {
    int64_t prompt_tokens = 0;
    for (const Prompt& p : request_.prompts) {
      prompt_tokens += static_cast<int64_t>(p.tokens.size());
    }
    return {{"prompt_tokens", prompt_tokens},
            {"completion_tokens", drawn},
            {"total_tokens", prompt_tokens + drawn}};
  }

  // Takes what the choice has to show.
  Json choice_json(size_t index, Choice& choice) {
    std::string text;
    const bool at_prompt = std::exchange(choice.at_prompt, false);
    if (at_prompt && request_.echo) text = prompt(index).text;
    text += std::exchange(choice.ready, {});
    Json logprobs;
    if (request_.logprobs) {
      std::vector<std::string_view> parts;
      if (at_prompt && request_.echo) parts = parts_of(context_.tokenizer, prompt(index));
      logprobs = logprobs_json(context_.tokenizer, choice.logprobs, parts, offsets_[index]);
      choice.logprobs.clear();
    }
    Json reason;
    if (choice.finished) reason = choice.reason == FinishReason::kStop ? "stop" : "length";
    return {{"index", index},
            {"text", std::move(text)},
            {"logprobs", std::move(logprobs)},
            {"finish_reason", std::move(reason)}};
  }

  static std::string event(const Json& json) {
    return fmt::format("data: {}\n\n", json.dump(-1, ' ', false, Json::error_handler_t::replace));
  }

  void add_event(std::string& events, size_t index, Choice& choice) {
    if (told_[index]) return;
    // The prompt is shown together with the first token, so that its logprobs are there.
    const bool news = !choice.ready.empty() || !choice.logprobs.empty() || choice.finished;
    if (!news) return;
    if (choice.finished) {
      told_[index] = true;
      try {
        check_reason(choice.reason, context_.time_limit);
      } catch (const ApiError& error) {
        events += event(error_json(error));
        return;
      }
    }
    Json json = head();
    json["choices"] = Json::array({choice_json(index, choice)});
    if (request_.stream_usage) json["usage"] = nullptr;  // as OpenAI's: the last event has it
    events += event(json);
  }

  CompletionContext context_;
  CompletionRequest request_;
  std::shared_ptr<Completion> completion_;
  std::vector<CharacterOffsets> offsets_;  // of each choice's tokens
  std::vector<bool> told_;                 // the end of each choice
  std::string id_;
  int64_t created_;
};

}  // namespace

std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, bool starts_with_bos,
                                   const std::string& prompt) {
  std::vector<int32_t> tokens;
  if (starts_with_bos && tokenizer.bos() >= 0) tokens.push_back(tokenizer.bos());
  tokenizer.encode(prompt, tokens);
  if (tokens.empty() && tokenizer.eos() >= 0) tokens.push_back(tokenizer.eos());
  return tokens;
}

HttpResponse answer_completion(const CompletionContext& context, HttpRequest& request) {
  // The values of the JSON take many times the memory of what they ask for.
  CompletionRequest completion = read_request(context, RequestFields(request.body));
  request.drop_body();
  const bool stream = completion.stream;
  auto answer = std::make_shared<Answer>(context, std::move(completion));
  if (!stream) return answer->whole(request.left);
  HttpResponse response;
  response.type = "text/event-stream";
  response.headers.emplace_back("Cache-Control", "no-cache");
  response.stream = [answer, left = request.left](std::string& part) {
    return answer->next_events(part, left);
  };
  return response;
}

}  // namespace sbtrain
