// Continuous batching: sequences of many requests are continued together by one model.
//
// Requests wait in a bounded queue. Between two decode steps, finished sequences leave their slots
// and waiting ones take them: their prompts run one at a time, and a long one runs a few layers
// between two steps, so that those that are being continued wait for a bounded number of prompt
// tokens only. Nothing here knows HTTP or text.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "serve/decode_batch.h"
#include "serve/sampling.h"

namespace sbtrain {

using ServeClock = std::chrono::steady_clock;

struct SequenceRequest {
  // At least one token; with sampling.max_tokens at most the batch's capacity.
  std::vector<int32_t> prompt;
  SamplingOptions sampling;
  double repetition_penalty = 1;       // LogitChanges, for the tokens of prompt and completion
  std::vector<int32_t> stop_tokens{};  // one of them ends the sequence where it is drawn
  int64_t min_tokens = 0;              // none of them is drawn before as many others
  bool prompt_logprobs = false;        // of the prompt's tokens as well
  int64_t top_logprobs = 0;            // how many alternatives are listed for each token
  bool logprobs = false;               // of the tokens that are drawn
  ServeClock::time_point deadline = ServeClock::time_point::max();
};

enum class FinishReason : uint8_t {
  kStop,     // a stop token was drawn, or the listener has seen enough
  kLength,   // max_tokens
  kLeft,     // nobody wants the result any more
  kExpired,  // the deadline has passed
  kNoRoom,   // the cache keeps too many keys of all sequences (KeyDropping)
  kFailed,   // the engine has ended: it was stopped, or the model has failed
};

// Who receives a sequence. All calls come from the engine's thread, in this order; they must be
// quick.
class SequenceListener {
 public:
  virtual ~SequenceListener() = default;
  // Asked between steps, from the moment of the request on; once false, the sequence ends.
  virtual bool wanted() const = 0;
  // With prompt_logprobs: one for each token of the prompt. The first, which follows nothing, has a
  // logprob of 0 and no alternatives.
  virtual void on_prompt(std::vector<TokenLogprob> tokens) = 0;
  // A token was drawn, be it a stop token, after which on_finish(kStop) follows. Returns whether
  // more are wanted.
  virtual bool on_token(const TokenLogprob& token, bool is_stop_token) = 0;
  virtual void on_finish(FinishReason reason) = 0;
};

struct EngineLimits {
  int64_t waiting = 1024;  // sequences in the queue
  // That may run between two decode steps: tokens through all layers, or more tokens through some
  // of them. A layer of a prompt is not divided, so that less than one layer's more may run, and of
  // a longer prompt than this times the layers just one layer.
  int64_t prompt_tokens = 512;
};

struct EngineStats {
  int64_t waiting = 0;
  int64_t running = 0;
  int64_t prompt_tokens = 0;     // run so far
  int64_t generated_tokens = 0;  // drawn so far
  int64_t steps = 0;             // decode steps so far
  int64_t finished = 0;          // sequences so far, for whatever reason
  int64_t left = 0;              // of these, with kLeft
  int64_t expired = 0;           // of these, with kExpired
  int64_t no_room = 0;           // of these, with kNoRoom
  CacheUse cache;                // where keys are dropped
};

class Engine {
 public:
  // `batch` must outlive the engine, and belongs to it.
  Engine(DecodeBatch& batch, const EngineLimits& limits) : batch_(batch), limits_(limits) {}

  struct Submission {
    SequenceRequest request;
    std::shared_ptr<SequenceListener> listener;
  };
  enum class Admission : uint8_t { kAccepted, kFull, kClosed };
  // From any thread. All of them are accepted or none: kFull if the queue has too little room for
  // them now, kClosed after close(). Throws ExitCode::kInternal for a request that cannot run.
  Admission submit(std::vector<Submission> submissions);
  // From any thread: runs `task` on the engine's thread between two steps, when nobody else uses
  // the model, and returns when it has run. Returns false, without running it, if too many wait.
  // Rethrows what it throws.
  bool run_alone(const std::function<void()>& task);
  // From any thread: wakes run() up, because a listener has changed its mind.
  void wake();
  // From any thread. No sequence is accepted from now on, and run() returns when those that were
  // have ended, at `deadline` at the latest.
  void close(ServeClock::time_point deadline);

  // Works until close(). When it ends, by an exception too, all sequences have ended.
  void run();

  int64_t waiting_limit() const { return limits_.waiting; }
  int64_t capacity() const { return batch_.capacity(); }
  EngineStats stats() const;

 private:
  struct Waiting {
    SequenceRequest request;
    std::shared_ptr<SequenceListener> listener;
  };
  struct Running {
    SequenceRequest request;
    std::shared_ptr<SequenceListener> listener;
    int64_t slot = -1;
    int64_t drawn = 0;
    std::vector<int32_t> seen{};  // the tokens so far, each once, ordered; for a repetition penalty
    bool ready = false;  // the prompt has run; only the last sequence's may be still running
    std::shared_ptr<std::vector<TokenLogprob>> prompt_logprobs{};  // if they are asked for
  };
  struct Task;

  bool wait_for_work();
  void run_tasks();
  void drop_unwanted();
  void admit();
  bool begin_next();
  void prompt_done(Running& mine);
  static LogitChanges changes_for(const Running& r);
  void draw();
  void step();
  void make_room();
  void finish(SequenceListener& listener, FinishReason reason);
  void end_all(FinishReason reason);
  // Ends running sequences for which `ended` gives a reason.
  template <typename Ended>
  void remove_running(Ended&& ended);

  DecodeBatch& batch_;
  EngineLimits limits_;
  std::vector<Running> running_;  // of run() alone
  std::vector<int32_t> next_tokens_;

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::deque<Waiting> waiting_;
  std::deque<std::shared_ptr<Task>> tasks_;
  bool closed_ = false;
  ServeClock::time_point close_deadline_ = ServeClock::time_point::max();
  EngineStats stats_;
};

}  // namespace sbtrain
