#include "serve/completions.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <span>

#include "core/error.h"
#include "serve/api_request.h"
#include "serve/completion_request.h"
#include "serve/completion_text.h"

namespace sbtrain {
namespace {

// How often a thread that waits for tokens looks whether its client is still there.
constexpr std::chrono::milliseconds kGlance{100};

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
