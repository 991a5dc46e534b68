#include "serve/engine.h"

#include <algorithm>
#include <future>
#include <optional>

#include "core/error.h"
#include "core/in_parallel.h"

namespace sbtrain {
namespace {

constexpr size_t kMostTasks = 16;

// Why a sequence that is not complete ends now, if it does.
std::optional<FinishReason> ended_early(const SequenceRequest& request,
                                        const SequenceListener& listener,
                                        ServeClock::time_point now) {
  if (!listener.wanted()) return FinishReason::kLeft;
  if (now >= request.deadline) return FinishReason::kExpired;
  return std::nullopt;
}

}  // namespace

struct Engine::Task {
  std::packaged_task<void()> work;
};

Engine::Admission Engine::submit(std::vector<Submission> submissions) {
  for (const Submission& s : submissions) {
    const auto length = static_cast<int64_t>(s.request.prompt.size());
    require(length > 0 && s.request.sampling.max_tokens >= 0 &&
                s.request.sampling.max_tokens <= batch_.capacity() - length,
            "a request of {} + {} tokens for a capacity of {}", length,
            s.request.sampling.max_tokens, batch_.capacity());
  }
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return Admission::kClosed;
    if (waiting_.size() + submissions.size() > static_cast<size_t>(limits_.waiting)) {
      return Admission::kFull;
    }
    for (Submission& s : submissions) {
      waiting_.push_back({std::move(s.request), std::move(s.listener)});
    }
  }
  work_.notify_all();
  return Admission::kAccepted;
}

bool Engine::run_alone(const std::function<void()>& task) {
  auto mine = std::make_shared<Task>(Task{std::packaged_task<void()>(task)});
  std::future<void> done = mine->work.get_future();
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || tasks_.size() >= kMostTasks) return false;
    // Only the queue holds it from now on: what is dropped there must break the promise.
    tasks_.push_back(std::move(mine));
  }
  work_.notify_all();
  try {
    done.get();
  } catch (const std::future_error&) {
    return false;  // the engine has ended without running it
  }
  return true;
}

void Engine::wake() {
  work_.notify_all();
}

void Engine::close(ServeClock::time_point deadline) {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    close_deadline_ = std::min(close_deadline_, deadline);
  }
  work_.notify_all();
}

EngineStats Engine::stats() const {
  const std::lock_guard lock(mutex_);
  EngineStats stats = stats_;
  stats.waiting = static_cast<int64_t>(waiting_.size());
  return stats;
}

void Engine::run() {
  next_tokens_.assign(static_cast<size_t>(batch_.slots()), 0);
  try {
    while (wait_for_work()) {
      run_tasks();
      drop_unwanted();
      admit();
      draw();
      step();
    }
  } catch (...) {
    close(ServeClock::now());
    end_all(FinishReason::kFailed);
    throw;
  }
  end_all(FinishReason::kFailed);
}

// Returns false when there is nothing more to do.
bool Engine::wait_for_work() {
  std::unique_lock lock(mutex_);
  const auto idle = [&] { return waiting_.empty() && tasks_.empty() && running_.empty(); };
  work_.wait(lock, [&] { return closed_ || !idle(); });
  return !closed_ || (!idle() && ServeClock::now() < close_deadline_);
}

void Engine::run_tasks() {
  while (true) {
    std::shared_ptr<Task> task;
    {
      const std::lock_guard lock(mutex_);
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task->work();
  }
}

void Engine::finish(SequenceListener& listener, FinishReason reason) {
  {
    const std::lock_guard lock(mutex_);
    ++stats_.finished;
    stats_.left += reason == FinishReason::kLeft;
    stats_.expired += reason == FinishReason::kExpired;
    stats_.no_room += reason == FinishReason::kNoRoom;
    stats_.running = static_cast<int64_t>(running_.size());
    stats_.cache = batch_.cache_use();
  }
  listener.on_finish(reason);
}

template <typename Ended>
void Engine::remove_running(Ended&& ended) {
  for (size_t i = 0; i < running_.size();) {
    const std::optional<FinishReason> reason = ended(running_[i]);
    if (!reason) {
      ++i;
      continue;
    }
    const Running gone = std::move(running_[i]);
    running_.erase(running_.begin() + static_cast<ptrdiff_t>(i));
    if (gone.slot >= 0) batch_.stop(gone.slot);
    finish(*gone.listener, *reason);
  }
}

void Engine::drop_unwanted() {
  const ServeClock::time_point now = ServeClock::now();
  std::vector<std::pair<Waiting, FinishReason>> dropped;
  {
    const std::lock_guard lock(mutex_);
    std::deque<Waiting> kept;
    for (Waiting& w : waiting_) {
      if (const auto reason = ended_early(w.request, *w.listener, now)) {
        dropped.emplace_back(std::move(w), *reason);
      } else {
        kept.push_back(std::move(w));
      }
    }
    waiting_ = std::move(kept);
  }
  for (const auto& [sequence, reason] : dropped) finish(*sequence.listener, reason);
  remove_running([&](const Running& r) { return ended_early(r.request, *r.listener, now); });
}

// Runs prompts, until as many tokens have run as may between two steps.
void Engine::admit() {
  for (int64_t tokens = limits_.prompt_tokens; tokens > 0;) {
    if ((running_.empty() || running_.back().ready) && !begin_next()) return;
    try {
      if (batch_.advance(tokens)) prompt_done(running_.back());
    } catch (const CacheFull&) {
      const Running gone = std::move(running_.back());
      running_.pop_back();
      finish(*gone.listener, FinishReason::kNoRoom);
    }
  }
}

// Gives a slot to the sequence that waits longest. Returns false if none waits, or no slot is free.
bool Engine::begin_next() {
  if (batch_.free_slots() == 0) return false;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) return false;
    // Listed before anything can fail, so that its listener hears of the end in any case.
    running_.push_back({.request = std::move(waiting_.front().request),
                        .listener = std::move(waiting_.front().listener)});
    waiting_.pop_front();
    stats_.running = static_cast<int64_t>(running_.size());
  }
  Running& mine = running_.back();
  const SequenceRequest& request = mine.request;
  if (request.repetition_penalty != 1) {
    mine.seen = request.prompt;
    std::ranges::sort(mine.seen);
    mine.seen.erase(std::unique(mine.seen.begin(), mine.seen.end()), mine.seen.end());
  }
  const int64_t reach = static_cast<int64_t>(request.prompt.size()) + request.sampling.max_tokens;
  if (!request.prompt_logprobs) {
    mine.slot = batch_.begin(request.prompt, nullptr, reach);
    return true;
  }
  const auto tokens = std::make_shared<std::vector<TokenLogprob>>(request.prompt.size());
  tokens->front().token = request.prompt.front();
  mine.prompt_logprobs = tokens;
  // The request moves when another sequence ends.
  const auto see = [tokens, prompt = request.prompt, top = request.top_logprobs](
                       int64_t first, int64_t rows, std::span<const float> logits) {
    const size_t vocab = logits.size() / static_cast<size_t>(rows);
    in_parallel(rows, [&](int64_t row) {
      const auto t = static_cast<size_t>(first + row) + 1;  // whom these logits predict
      if (t == prompt.size()) return;
      (*tokens)[t] =
          token_logprob(logits.subspan(static_cast<size_t>(row) * vocab, vocab), prompt[t], top);
    });
  };
  mine.slot = batch_.begin(request.prompt, see, reach);
  return true;
}

void Engine::prompt_done(Running& mine) {
  mine.ready = true;
  if (mine.prompt_logprobs) mine.listener->on_prompt(std::move(*mine.prompt_logprobs));
  const std::lock_guard lock(mutex_);
  stats_.prompt_tokens += static_cast<int64_t>(mine.request.prompt.size());
}

LogitChanges Engine::changes_for(const Running& r) {
  LogitChanges changes = {.repetition_penalty = r.request.repetition_penalty, .seen = r.seen};
  if (r.drawn < r.request.min_tokens) changes.banned = r.request.stop_tokens;
  return changes;
}

// Draws the next token of each running sequence from the logits of its slot.
void Engine::draw() {
  std::vector<TokenLogprob> drawn(running_.size());
  if (std::ranges::any_of(running_, [&](const Running& r) {
        return r.ready && (r.request.logprobs || changes_for(r).any() ||
                           batch_.draws_from_logits(r.request.sampling));
      })) {
    batch_.fetch_logits();
  }
  in_parallel(static_cast<int64_t>(running_.size()), [&](int64_t i) {
    const Running& r = running_[static_cast<size_t>(i)];
    const SamplingOptions& sampling = r.request.sampling;
    if (!r.ready || sampling.max_tokens == 0) return;
    TokenLogprob& of_token = drawn[static_cast<size_t>(i)];
    of_token.token = batch_.draw(r.slot, sampling, static_cast<uint64_t>(r.drawn), changes_for(r));
    if (r.request.logprobs) {
      of_token = token_logprob(batch_.logits(r.slot), of_token.token, r.request.top_logprobs);
    }
  });
  size_t i = 0;
  int64_t tokens = 0;
  remove_running([&](Running& r) -> std::optional<FinishReason> {
    const TokenLogprob& token = drawn[i++];
    if (!r.ready) return std::nullopt;
    if (r.request.sampling.max_tokens == 0) return FinishReason::kLength;
    ++tokens;
    ++r.drawn;
    if (r.request.repetition_penalty != 1) {
      const auto at = std::ranges::lower_bound(r.seen, token.token);
      if (at == r.seen.end() || *at != token.token) r.seen.insert(at, token.token);
    }
    const bool stops = std::ranges::count(r.request.stop_tokens, token.token) > 0;
    if (!r.listener->on_token(token, stops) || stops) return FinishReason::kStop;
    if (r.drawn == r.request.sampling.max_tokens) return FinishReason::kLength;
    next_tokens_[static_cast<size_t>(r.slot)] = token.token;
    return std::nullopt;
  });
  const std::lock_guard lock(mutex_);
  stats_.generated_tokens += tokens;
}

// Appends the drawn tokens, which gives each running sequence new logits.
void Engine::step() {
  make_room();
  if (std::ranges::none_of(running_, &Running::ready)) return;
  batch_.step(next_tokens_);
  const std::lock_guard lock(mutex_);
  ++stats_.steps;
  stats_.cache = batch_.cache_use();
}

// A sequence for whose next token the cache has no room ends. What it leaves may be enough for
// others, which are asked again.
void Engine::make_room() {
  while (true) {
    const std::vector<int64_t> without = batch_.make_room();
    if (without.empty()) return;
    remove_running([&, ended = false](const Running& r) mutable -> std::optional<FinishReason> {
      if (ended || r.slot != without.back()) return std::nullopt;
      ended = true;
      return FinishReason::kNoRoom;
    });
  }
}

void Engine::end_all(FinishReason reason) {
  std::deque<Waiting> waiting;
  std::deque<std::shared_ptr<Task>> tasks;
  {
    const std::lock_guard lock(mutex_);
    waiting.swap(waiting_);
    tasks.swap(tasks_);  // the promise of a task that never runs is broken, which ends its wait
  }
  for (const Waiting& w : waiting) finish(*w.listener, reason);
  remove_running([&](const Running&) { return reason; });
}

}  // namespace sbtrain
