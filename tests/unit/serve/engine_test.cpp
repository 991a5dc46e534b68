#include "serve/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <memory>
#include <thread>

#include "attention/rotary.h"
#include "core/error.h"
#include "serve/generate.h"
#include "small_model.h"

namespace sbtrain::test {
namespace {

using namespace std::chrono_literals;

// Keeps what it receives. `most`: tokens that it wants.
class Keeper : public SequenceListener {
 public:
  explicit Keeper(size_t most = 1000) : most_(most) {}
  bool wanted() const override { return !left; }
  void on_prompt(std::vector<TokenLogprob> tokens) override { prompt = std::move(tokens); }
  bool on_token(const TokenLogprob& token, bool is_stop) override {
    EXPECT_FALSE(stopped);
    stopped = is_stop;
    tokens.push_back(token.token);
    logprobs.push_back(token);
    if (on_each) on_each();
    return tokens.size() < most_;
  }
  void on_finish(FinishReason reason) override { finished.set_value(reason); }

  FinishReason wait() {
    std::future<FinishReason> future = finished.get_future();
    if (future.wait_for(60s) != std::future_status::ready) {
      ADD_FAILURE() << "the sequence has not ended";
      std::abort();
    }
    return future.get();
  }

  std::atomic<bool> left = false;
  bool stopped = false;
  std::vector<TokenLogprob> prompt, logprobs;
  std::vector<int32_t> tokens;
  std::function<void()> on_each;
  std::promise<FinishReason> finished;

 private:
  size_t most_;
};

SequenceRequest request(std::vector<int32_t> prompt, int64_t max_tokens, double temperature = 0) {
  return {.prompt = std::move(prompt),
          .sampling = {.max_tokens = max_tokens, .temperature = temperature}};
}

// An engine that runs in a thread of its own.
class Running {
 public:
  explicit Running(const ModelConfig& config, int64_t slots, EngineLimits limits = {},
                   int64_t capacity = 64, const DecodeOptions& options = {})
      : model_(config, slots, capacity, options), engine(model_.batch, limits) {}
  ~Running() { stop(); }
  void start() {
    thread_ = std::thread([this] { engine.run(); });
  }
  void stop(ServeClock::duration grace = 60s) {
    engine.close(ServeClock::now() + grace);
    if (thread_.joinable()) thread_.join();
  }
  std::shared_ptr<Keeper> submit(SequenceRequest request, size_t most = 1000) {
    auto keeper = std::make_shared<Keeper>(most);
    EXPECT_EQ(engine.submit({{std::move(request), keeper}}), Engine::Admission::kAccepted);
    return keeper;
  }

 private:
  SmallModel model_;
  std::thread thread_;

 public:
  Engine engine;
};

const ModelConfig kConfig = small_config(kAllCaches);  // NOLINT: throws only if it is wrong

std::vector<int32_t> generated_alone(const SequenceRequest& request) {
  SmallModel model(kConfig);
  return generate(model.run.model(), model.run.params(), model.run.stream(), request.prompt,
                  request.sampling, request.stop_tokens.empty() ? -1 : request.stop_tokens.front());
}

TEST(Engine, WritesWhatGenerateWritesWhateverElseRuns) {
  Running running(kConfig, 3);
  std::vector<SequenceRequest> requests;
  std::vector<std::shared_ptr<Keeper>> keepers;
  for (int i = 0; i < 20; ++i) {
    SequenceRequest r = request(random_prompt(1 + 3 * i % 17, i), 1 + 5 * i % 23, i % 2);
    r.sampling.seed = i;
    r.sampling.top_p = i % 4 == 1 ? 0.9 : 1.0;
    r.prompt_logprobs = r.logprobs = i % 3 == 0;
    requests.push_back(r);
    keepers.push_back(running.submit(r));
  }
  running.start();
  for (size_t i = 0; i < keepers.size(); ++i) {
    EXPECT_EQ(keepers[i]->wait(), FinishReason::kLength);
    EXPECT_EQ(keepers[i]->tokens, generated_alone(requests[i])) << i;
  }
  const EngineStats stats = running.engine.stats();
  EXPECT_EQ(stats.finished, 20);
  EXPECT_EQ(stats.running, 0);
  EXPECT_EQ(stats.waiting, 0);
}

// A cache that drops keys, and has too few pages for two long sequences: one ends, and the other
// goes on as if nothing had happened.
TEST(Engine, EndsASequenceForWhichTheCacheHasNoRoom) {
  const ModelConfig config = small_config({kAllCaches[0]});
  // Nothing is dropped, so that each head has a page for 64 tokens: 10 of 2 * 3 * 4 pages.
  Running running(config, 2, {}, 200, {.dropping = {.below = 1e-30, .share = 10.0 / 24}});
  const auto whole = running.submit(request(random_prompt(193, 1), 1));
  const SequenceRequest long_one = request(random_prompt(60, 2), 120);
  const auto first = running.submit(long_one), second = running.submit(long_one);
  running.start();
  EXPECT_EQ(whole->wait(), FinishReason::kNoRoom);
  const FinishReason one = first->wait(), other = second->wait();
  EXPECT_NE(one == FinishReason::kNoRoom, other == FinishReason::kNoRoom);
  EXPECT_NE(one == FinishReason::kLength, other == FinishReason::kLength);
  const Keeper& complete = one == FinishReason::kLength ? *first : *second;
  const Keeper& ended = one == FinishReason::kLength ? *second : *first;
  SmallModel model(config);
  const std::vector<int32_t> expected =
      generate(model.run.model(), model.run.params(), model.run.stream(), long_one.prompt,
               long_one.sampling, -1);
  EXPECT_EQ(complete.tokens, expected);
  ASSERT_LT(ended.tokens.size(), expected.size());
  EXPECT_TRUE(std::equal(ended.tokens.begin(), ended.tokens.end(), expected.begin()));
  running.stop();
  const EngineStats stats = running.engine.stats();
  EXPECT_EQ(stats.no_room, 2);
  EXPECT_EQ(stats.finished, 3);
  EXPECT_GT(stats.cache.seen, 0);
  EXPECT_EQ(stats.cache.kept, stats.cache.seen);
  EXPECT_EQ(stats.cache.bytes, 0);
}

// Each module with each way to know positions and to scale rotary ones, for texts longer than the
// trained length.
std::vector<std::string> modules_with_positions() {
  std::vector<std::string> layers = {
      "{type: softmax, position: alibi}",
      "{type: softmax, position: fire}",
      "{type: softmax, position: none}",
      "{type: softmax, rope_fraction: 0.5}",
      "{type: softmax, rope_fraction: 0.5, rope_scaling: dynamic_ntk, rope_train_length: 8}",
      "{type: softmax, qk_norm: true, qk_norm_scope: joint}",
      "{type: softmax, window: 5, rope_scaling: dynamic_ntk, rope_train_length: 8}",
      "{type: coca, variant: strict, rope_scaling: dynamic_ntk, rope_train_length: 8}"};
  for (const std::string_view name : attention_registry().names()) {
    const std::string type = fmt::format("{{type: {}", name);
    layers.push_back(type + "}");
    AttentionConfig config = parse_attention(layers.back());
    if (attention_registry().at(name).rotary(config.options) == nullptr) continue;
    for (const auto& [scaling, word] : kNames<RotaryScaling>) {
      if (scaling == RotaryScaling::kNone) continue;
      const bool fixed = scaling == RotaryScaling::kLinear || scaling == RotaryScaling::kNtk;
      layers.push_back(fmt::format("{}, rope_scaling: {}, rope_factor: 2.5{}}}", type, word,
                                   fixed ? "" : ", rope_train_length: 8"));
    }
  }
  return layers;
}

// What a client reads does not depend on the most tokens that the server would continue, nor on its
// neighbours: it is what generate() writes, and what a forward pass over all of it computes.
TEST(Engine, PositionsAreThoseOfTheRequest) {
  constexpr int32_t kPrompt = 11, kTokens = 20, kAll = kPrompt + kTokens;
  SequenceRequest r = request(random_prompt(kPrompt, 4), kTokens);
  r.prompt_logprobs = r.logprobs = true;
  for (const std::string& layer : modules_with_positions()) {
    const ModelConfig config = small_config({layer, layer});
    SmallModel alone(config);
    const std::vector<int32_t> written =
        generate(alone.run.model(), alone.run.params(), alone.run.stream(), r.prompt, r.sampling,
                 /*stop_token=*/-1);
    PackedBatch text = packed_batch({kAll}, kVocab);
    std::copy(r.prompt.begin(), r.prompt.end(), text.tokens.begin());
    std::copy(written.begin(), written.end(), text.tokens.begin() + kPrompt);
    const std::vector<float> logits = ModelRun(Backend::kCpu, config, text).logits();
    const auto expected = [&](size_t t) {  // the logprob of token t
      const auto row = std::span(logits).subspan((t - 1) * kVocab, kVocab);
      return token_logprob(row, text.tokens[t], 0).logprob;
    };
    std::vector<TokenLogprob> first;
    for (const int64_t capacity : {int64_t{kAll}, int64_t{64}, int64_t{300}}) {
      for (const int others : {0, 3}) {
        Running running(config, 4, {.prompt_tokens = 7}, capacity);
        std::vector<std::shared_ptr<Keeper>> keepers;
        for (int i = 0; i < others; ++i) {
          keepers.push_back(
              running.submit(request(random_prompt(3 + i, i), capacity / (i + 1) - 3 - i)));
        }
        const auto mine = running.submit(r);
        running.start();
        EXPECT_EQ(mine->wait(), FinishReason::kLength);
        EXPECT_EQ(mine->tokens, written) << layer << " capacity " << capacity;
        std::vector<TokenLogprob> all = mine->prompt;
        all.insert(all.end(), mine->logprobs.begin(), mine->logprobs.end());
        ASSERT_EQ(all.size(), static_cast<size_t>(kAll));
        if (first.empty()) first = all;
        for (size_t t = 1; t < all.size(); ++t) {
          EXPECT_EQ(all[t].logprob, first[t].logprob) << layer << " token " << t;
          EXPECT_NEAR(all[t].logprob, expected(t), 2e-4)
              << layer << " token " << t << " capacity " << capacity;
        }
      }
    }
  }
}

TEST(Engine, LogprobsHaveTheSameBitsAloneAndInABatch) {
  const auto logprobs_of = [](int others, int64_t prompt_tokens) {
    Running running(kConfig, 4, {.prompt_tokens = prompt_tokens});
    std::vector<std::shared_ptr<Keeper>> keepers;
    for (int i = 0; i < others; ++i) {
      keepers.push_back(running.submit(request(random_prompt(5 + i, 90 + i), 10)));
    }
    SequenceRequest r = request(random_prompt(30, 7), 12);
    r.prompt_logprobs = r.logprobs = true;
    r.top_logprobs = 3;
    const auto mine = running.submit(r);
    running.start();
    EXPECT_EQ(mine->wait(), FinishReason::kLength);
    EXPECT_EQ(mine->prompt.size(), 30U);
    std::vector<float> all;
    for (const auto& tokens : {mine->prompt, mine->logprobs}) {
      for (const TokenLogprob& token : tokens) {
        all.push_back(token.logprob);
        for (const auto& [id, logprob] : token.top) all.push_back(logprob);
      }
    }
    EXPECT_EQ(all.size(), (30 + 12) * 4 - 3U);  // the first token follows nothing
    return all;
  };
  const std::vector<float> alone = logprobs_of(0, 1000);
  EXPECT_EQ(alone, logprobs_of(3, 1000));
  EXPECT_EQ(alone, logprobs_of(9, 1000));
  // The prompt runs in parts, between the steps of others.
  EXPECT_EQ(alone, logprobs_of(0, 1));
  EXPECT_EQ(alone, logprobs_of(3, 7));
  EXPECT_EQ(alone, logprobs_of(9, 1));
}

// While a long prompt runs, those that are being continued get a token after each part of it.
TEST(Engine, ALongPromptDoesNotHoldOthers) {
  const auto tokens_of_other_before = [](int64_t prompt_tokens) {
    Running running(kConfig, 2, {.prompt_tokens = prompt_tokens});
    const auto other = running.submit(request(random_prompt(2, 1), 40));
    const auto long_one = running.submit(request(random_prompt(60, 2), 2));
    size_t before = 0;
    long_one->on_each = [&] {
      if (long_one->tokens.size() == 1) before = other->tokens.size();
    };
    running.start();
    EXPECT_EQ(long_one->wait(), FinishReason::kLength);
    EXPECT_EQ(other->wait(), FinishReason::kLength);
    return before;
  };
  EXPECT_EQ(tokens_of_other_before(1000), 1U);
  // 60 tokens in four layers: two layers are 30 tokens in all, one is 15.
  EXPECT_EQ(tokens_of_other_before(30), 2U);
  EXPECT_EQ(tokens_of_other_before(15), 4U);
  EXPECT_EQ(tokens_of_other_before(1), 5U);  // the first part is the other's prompt
}

TEST(Engine, APromptIsGivenUpBetweenItsParts) {
  Running running(kConfig, 2, {.prompt_tokens = 1});
  const auto other = running.submit(request(random_prompt(2, 1), 20));
  const auto leaves = running.submit(request(random_prompt(60, 2), 2));
  other->on_each = [&] { leaves->left = other->tokens.size() == 3; };
  const SequenceRequest r = request(random_prompt(50, 3), 5);
  const auto next = running.submit(r);
  running.start();
  EXPECT_EQ(leaves->wait(), FinishReason::kLeft);
  EXPECT_TRUE(leaves->tokens.empty());
  EXPECT_EQ(next->wait(), FinishReason::kLength);
  EXPECT_EQ(next->tokens, generated_alone(r));
  EXPECT_EQ(other->wait(), FinishReason::kLength);
}

TEST(Engine, EndsAtTheStopToken) {
  SequenceRequest r = request(random_prompt(6, 3), 20);
  const std::vector<int32_t> tokens = generated_alone(r);
  r.stop_tokens = {tokens[5]};
  const size_t first = std::find(tokens.begin(), tokens.end(), tokens[5]) - tokens.begin();
  Running running(kConfig, 2);
  const auto keeper = running.submit(r);
  running.start();
  EXPECT_EQ(keeper->wait(), FinishReason::kStop);
  EXPECT_TRUE(keeper->stopped);
  EXPECT_EQ(keeper->tokens.size(), first + 1);
  EXPECT_EQ(keeper->tokens.back(), tokens[5]);
}

// One of several, and none of them before min_tokens others.
TEST(Engine, EndsAtAStopTokenAfterTheFewestTokens) {
  const SequenceRequest plain = request(random_prompt(6, 3), 20);
  const std::vector<int32_t> tokens = generated_alone(plain);
  const auto ends = [&](std::vector<int32_t> stops, int64_t min_tokens) {
    SequenceRequest r = plain;
    r.stop_tokens = std::move(stops);
    r.min_tokens = min_tokens;
    Running running(kConfig, 2);
    auto keeper = running.submit(r);
    running.start();
    keeper->wait();
    return keeper;
  };
  const auto first_of = [&](const std::vector<int32_t>& stops) {
    return std::find_first_of(tokens.begin(), tokens.end(), stops.begin(), stops.end()) -
           tokens.begin();
  };
  const std::vector<int32_t> stops = {tokens[9], tokens[4], kVocab - 1};
  EXPECT_EQ(ends(stops, 0)->tokens.size(), static_cast<size_t>(first_of(stops)) + 1);
  EXPECT_TRUE(ends(stops, first_of(stops))->stopped);
  for (const int64_t min_tokens : {first_of(stops) + 1, ptrdiff_t{12}, ptrdiff_t{20}}) {
    const auto keeper = ends(stops, min_tokens);
    EXPECT_TRUE(
        std::equal(tokens.begin(), tokens.begin() + first_of(stops), keeper->tokens.begin()));
    for (int64_t i = 0; i < min_tokens; ++i) {
      EXPECT_EQ(std::count(stops.begin(), stops.end(), keeper->tokens.at(i)), 0) << i;
    }
  }
}

// The definition, from the logits of each step.
TEST(Engine, PenalisesTokensOfPromptAndCompletion) {
  SequenceRequest r = request(random_prompt(9, 5), 20);
  r.repetition_penalty = 1.7;
  SmallModel model(kConfig);
  const int64_t slot = model.batch.start(r.prompt, nullptr, 29);
  std::vector<int32_t> all = r.prompt;
  for (int i = 0; i < 20; ++i) {
    std::vector<float> logits(model.batch.logits(slot).begin(), model.batch.logits(slot).end());
    for (int32_t token = 0; token < kVocab; ++token) {
      if (std::count(all.begin(), all.end(), token) == 0) continue;
      float& x = logits[static_cast<size_t>(token)];
      x = x > 0 ? x / 1.7f : x * 1.7f;
    }
    all.push_back(
        static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
    if (i < 19) model.batch.step(std::array{all.back()});
  }
  const std::vector<int32_t> expected(all.begin() + 9, all.end());
  EXPECT_NE(expected, generated_alone(r));
  for (const int others : {0, 2}) {
    Running running(kConfig, 3);
    for (int i = 0; i < others; ++i) running.submit(request(random_prompt(4 + i, i), 30));
    const auto keeper = running.submit(r);
    running.start();
    EXPECT_EQ(keeper->wait(), FinishReason::kLength);
    EXPECT_EQ(keeper->tokens, expected);
  }
}

TEST(Engine, ScoresAPromptWithoutATokenMore) {
  SequenceRequest r = request(random_prompt(64, 3), 0);  // as long as the capacity
  r.prompt_logprobs = true;
  Running running(kConfig, 1);
  const auto keeper = running.submit(r);
  running.start();
  EXPECT_EQ(keeper->wait(), FinishReason::kLength);
  EXPECT_EQ(keeper->prompt.size(), 64U);
  EXPECT_TRUE(keeper->tokens.empty());
}

TEST(Engine, EndsWhereTheListenerHasEnough) {
  Running running(kConfig, 2);
  const auto keeper = running.submit(request(random_prompt(4, 4), 50), 3);
  running.start();
  EXPECT_EQ(keeper->wait(), FinishReason::kStop);
  EXPECT_EQ(keeper->tokens.size(), 3U);
}

TEST(Engine, DropsSequencesThatNobodyWants) {
  Running running(kConfig, 1);
  const auto leaves = running.submit(request(random_prompt(4, 4), 60));
  leaves->on_each = [&] { leaves->left = leaves->tokens.size() == 5; };
  const auto left_in_queue = running.submit(request(random_prompt(4, 5), 60));
  left_in_queue->left = true;
  const SequenceRequest r = request(random_prompt(4, 6), 8);
  const auto stays = running.submit(r);
  running.start();
  EXPECT_EQ(leaves->wait(), FinishReason::kLeft);
  EXPECT_EQ(leaves->tokens.size(), 5U);
  EXPECT_EQ(left_in_queue->wait(), FinishReason::kLeft);
  EXPECT_TRUE(left_in_queue->tokens.empty());
  EXPECT_EQ(stays->wait(), FinishReason::kLength);
  EXPECT_EQ(stays->tokens, generated_alone(r));
  EXPECT_EQ(running.engine.stats().left, 2);
}

TEST(Engine, DeadlinesHoldInTheQueueAndWhileRunning) {
  Running running(kConfig, 1);
  SequenceRequest r = request(random_prompt(4, 4), 60);
  r.deadline = ServeClock::now() + 1h;
  const auto runs = running.submit(r);
  runs->on_each = [&] { std::this_thread::sleep_for(1ms); };
  r.deadline = ServeClock::now() - 1ms;
  const auto waits = running.submit(r);
  running.start();
  EXPECT_EQ(waits->wait(), FinishReason::kExpired);
  EXPECT_EQ(runs->wait(), FinishReason::kLength);
  EXPECT_EQ(running.engine.stats().expired, 1);
}

TEST(Engine, TheQueueIsBoundedAndTakesAllOrNone) {
  Running running(kConfig, 1, {.waiting = 3});
  const auto submit = [&](size_t count) {
    std::vector<Engine::Submission> submissions;
    for (size_t i = 0; i < count; ++i) {
      submissions.push_back({request({1}, 1), std::make_shared<Keeper>()});
    }
    return running.engine.submit(std::move(submissions));
  };
  EXPECT_EQ(submit(4), Engine::Admission::kFull);
  EXPECT_EQ(submit(2), Engine::Admission::kAccepted);
  EXPECT_EQ(submit(2), Engine::Admission::kFull);
  EXPECT_EQ(submit(1), Engine::Admission::kAccepted);
  EXPECT_EQ(running.engine.stats().waiting, 3);
  EXPECT_THROW(running.submit(request(random_prompt(60, 1), 5)), Error);
  EXPECT_THROW(running.submit(request({}, 5)), Error);
}

TEST(Engine, ClosingLetsAcceptedSequencesEnd) {
  Running running(kConfig, 2);
  std::vector<std::shared_ptr<Keeper>> keepers;
  for (int i = 0; i < 6; ++i) keepers.push_back(running.submit(request({i + 1}, 20)));
  running.start();
  running.stop();
  for (const auto& keeper : keepers) EXPECT_EQ(keeper->wait(), FinishReason::kLength);
  EXPECT_EQ(running.engine.submit({{request({1}, 1), std::make_shared<Keeper>()}}),
            Engine::Admission::kClosed);
}

TEST(Engine, ClosingEndsTheRestAtItsDeadline) {
  Running running(kConfig, 1);
  const auto runs = running.submit(request({1}, 60));
  const auto waits = running.submit(request({2}, 60));
  std::promise<void> begun, closed;
  runs->on_each = [&] {
    if (runs->tokens.size() != 2) return;
    begun.set_value();
    closed.get_future().wait();  // so that the sequence cannot end first
  };
  running.start();
  begun.get_future().wait();
  running.engine.close(ServeClock::now());
  closed.set_value();
  running.stop(0s);
  EXPECT_EQ(runs->wait(), FinishReason::kFailed);
  EXPECT_EQ(waits->wait(), FinishReason::kFailed);
}

TEST(Engine, TasksRunBetweenSteps) {
  Running running(kConfig, 1);
  const auto keeper = running.submit(request({1}, 60));
  running.start();
  int ran = 0;
  EXPECT_TRUE(running.engine.run_alone([&] { ++ran; }));
  EXPECT_EQ(ran, 1);
  EXPECT_THROW(running.engine.run_alone([] { fail(ExitCode::kData, "no"); }), Error);
  EXPECT_EQ(keeper->wait(), FinishReason::kLength);
  running.stop();
  EXPECT_FALSE(running.engine.run_alone([&] { ++ran; }));
}

// A token that the model does not have makes the engine throw; nobody waits for ever.
TEST(Engine, AFailureEndsAllSequences) {
  Running running(kConfig, 2);
  const auto other = running.submit(request({1}, 5));
  const auto bad = running.submit(request({kVocab}, 5));
  const auto waits = running.submit(request({2}, 5));
  EXPECT_THROW(running.engine.run(), Error);
  EXPECT_EQ(other->wait(), FinishReason::kFailed);
  EXPECT_EQ(bad->wait(), FinishReason::kFailed);
  EXPECT_EQ(waits->wait(), FinishReason::kFailed);
}

// The failure comes while the task waits in the queue: it never runs, and its caller is told.
TEST(Engine, AFailureEndsTheWaitForATask) {
  Running running(kConfig, 1);
  const auto keeper = running.submit(request({1}, 5));
  bool ran = false;
  std::packaged_task<bool()> ask([&] { return running.engine.run_alone([&] { ran = true; }); });
  std::future<bool> answer = ask.get_future();
  std::promise<void> asking;
  std::thread asker;
  keeper->on_each = [&] {
    asker = std::thread([&] {
      asking.set_value();
      ask();
    });
    asking.get_future().wait();
    std::this_thread::sleep_for(100ms);  // time to get into the queue
    fail(ExitCode::kData, "the engine fails");
  };
  EXPECT_THROW(running.engine.run(), Error);
  if (answer.wait_for(60s) != std::future_status::ready) {
    ADD_FAILURE() << "the caller still waits";
    std::abort();
  }
  asker.join();
  EXPECT_FALSE(answer.get());
  EXPECT_FALSE(ran);
  EXPECT_EQ(keeper->wait(), FinishReason::kFailed);
}

}  // namespace
}  // namespace sbtrain::test
