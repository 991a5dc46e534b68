#include "job/tcp_control.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <exception>
#include <system_error>

#include "core/error.h"

namespace sbtrain::control {
namespace {

// How long a rank that fails waits for rank 0 to take note.
constexpr std::chrono::seconds kReportPatience{10};

// Signals are for the threads that have always been there.
std::thread thread_without_signals(std::function<void()> work) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(std::move(work));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw;
  }
}

}  // namespace

// ---- Clock -----------------------------------------------------------------------------------

Time WatchedClock::now() const {
  const auto passed = std::chrono::duration_cast<Time>(Real::now() - last_);
  return counted_ + std::min<Time>(passed, longest_);
}

void WatchedClock::tick() {
  counted_ = now();
  last_ = Real::now();
}

// ---- Callbacks -------------------------------------------------------------------------------

Control::FailureHandle FailureCallbacks::add(const std::shared_ptr<FailureCallbacks>& self,
                                             Callback call) {
  const std::lock_guard lock(self->mutex_);
  if (self->failure_) {
    call(*self->failure_);
    return nullptr;
  }
  const int id = self->next_++;
  self->callbacks_.emplace(id, std::move(call));
  return {self.get(), [self, id](void*) {
            const std::lock_guard lock(self->mutex_);
            self->callbacks_.erase(id);
          }};
}

void FailureCallbacks::call(const JobFailure& failure) {
  const std::lock_guard lock(mutex_);
  failure_ = failure;
  for (const auto& [id, callback] : callbacks_) callback(failure);
  callbacks_.clear();
}

// ---- Calls of other threads ------------------------------------------------------------------

TcpControl::TcpControl(int rank, int world, const Deadlines& deadlines)
    : rank_(rank),
      world_(world),
      deadlines_(deadlines),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      clock_(3 * deadlines.heartbeat) {
  require(wake_.get() >= 0, "no eventfd");
}

void TcpControl::post(Message message) {
  outbox_.push_back(std::move(message));
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof(one));
}

void TcpControl::wait_or_throw(std::unique_lock<std::mutex>& lock,
                               const std::function<bool()>& done) {
  changed_.wait(lock, [&] { return failure_ || done(); });
  if (!done()) throw Error(failure_->code, failure_->message);
}

std::vector<std::string> TcpControl::exchange(std::string_view topic, std::span<const int> members,
                                              std::string value) {
  require(std::ranges::is_sorted(members) && std::ranges::count(members, rank_) == 1 &&
              members.front() >= 0 && members.back() < world_,
          "exchange '{}' of rank {} with ranks {}", topic, rank_,
          describe_ranks({members.begin(), members.end()}));
  require(value.size() <= kLargestText, "exchange '{}': a text of {} bytes", topic, value.size());
  const Key key{std::string(topic), std::vector<uint32_t>(members.begin(), members.end())};
  std::unique_lock lock(mutex_);
  if (failure_) throw Error(failure_->code, failure_->message);
  post(Texts{.topic = key.first, .members = key.second, .texts = {std::move(value)}});
  wait_or_throw(lock, [&] { return arrived_.contains(key); });
  auto& waiting = arrived_.at(key);
  std::vector<std::string> texts = std::move(waiting.front());
  waiting.pop_front();
  if (waiting.empty()) arrived_.erase(key);
  return texts;
}

void TcpControl::progress(std::string_view what, std::chrono::milliseconds allowance) {
  const std::lock_guard lock(mutex_);
  doing_ = what;
  doing_since_ = clock_.now();
  allowance_ = allowance;
}

void TcpControl::waits_for(std::string_view what) {
  const std::lock_guard lock(mutex_);
  waits_for_ = what;
}

void TcpControl::report(const JobFailure& failure) {
  std::unique_lock lock(mutex_);
  if (failure_) return;
  own_failure_ = failure;
  post(Failure{.code = static_cast<uint32_t>(failure.code), .message = failure.message});
  if (changed_.wait_for(lock, kReportPatience, [&] { return failure_.has_value(); })) return;
  lock.unlock();
  note_failure(failure, /*shows=*/true);
}

Control::FailureHandle TcpControl::on_failure(std::function<void(const JobFailure&)> abort) {
  return FailureCallbacks::add(callbacks_, std::move(abort));
}

void TcpControl::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_) throw Error(failure_->code, failure_->message);
}

std::optional<JobFailure> TcpControl::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool TcpControl::shows_failure() const {
  const std::lock_guard lock(mutex_);
  return shows_failure_;
}

void TcpControl::finish() {
  std::unique_lock lock(mutex_);
  if (failure_) throw Error(failure_->code, failure_->message);
  if (ended_) return;
  doing_ = "finished";
  doing_since_ = clock_.now();
  allowance_ = {};
  post(Finished{});
  wait_or_throw(lock, [&] { return ended_; });
}

// ---- The thread ------------------------------------------------------------------------------

void TcpControl::start_thread() {
  thread_ = thread_without_signals([this] { run(); });
}

void TcpControl::run() {
  try {
    while (!stopping_) turn();
    close();
  } catch (const std::exception& error) {
    note_failure({.code = ExitCode::kInternal,
                  .message = fmt::format("the control channel has failed: {}", error.what())},
                 /*shows=*/true);
  }
}

void TcpControl::stop_thread() {
  stopping_ = true;
  {
    const std::lock_guard lock(mutex_);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = ::write(wake_.get(), &one, sizeof(one));
  }
  if (thread_.joinable()) thread_.join();
  if (aborting_.joinable()) aborting_.join();
}

void TcpControl::wait_for_start() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return failure_ || started_; });
}

std::chrono::milliseconds TcpControl::interval() const {
  return std::max<std::chrono::milliseconds>(deadlines_.heartbeat / 2,
                                             std::chrono::milliseconds(1));
}

std::vector<Message> TcpControl::take_outbox() {
  const std::lock_guard lock(mutex_);
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = ::read(wake_.get(), &count, sizeof(count));
  std::vector<Message> messages(std::make_move_iterator(outbox_.begin()),
                                std::make_move_iterator(outbox_.end()));
  outbox_.clear();
  return messages;
}

Time TcpControl::now() const {
  const std::lock_guard lock(mutex_);
  return clock_.now();
}

void TcpControl::tick() {
  const std::lock_guard lock(mutex_);
  clock_.tick();
}

Beat TcpControl::beat() const {
  const std::lock_guard lock(mutex_);
  const auto count = [](Time t) {
    return static_cast<uint64_t>(std::max<Time>(t, Time(0)).count());
  };
  const Time age = clock_.now() - doing_since_;
  return {.doing = doing_,
          .waits_for = waits_for_,
          .age_ms = count(age),
          .allowance_ms = count(allowance_ - age)};
}

void TcpControl::note_start() {
  const std::lock_guard lock(mutex_);
  started_ = true;
  doing_since_ = clock_.now();
  changed_.notify_all();
}

bool TcpControl::started() const {
  const std::lock_guard lock(mutex_);
  return started_;
}

void TcpControl::note_end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

bool TcpControl::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void TcpControl::deliver(Texts texts) {
  const std::lock_guard lock(mutex_);
  arrived_[{std::move(texts.topic), std::move(texts.members)}].push_back(std::move(texts.texts));
  changed_.notify_all();
}

void TcpControl::note_failure(const JobFailure& failure, bool shows) {
  const auto call = [callbacks = callbacks_, failure] { callbacks->call(failure); };
  {
    const std::lock_guard lock(mutex_);
    if (failure_ || ended_) return;
    failure_ = failure;
    shows_failure_ = shows;
    changed_.notify_all();
    try {
      aborting_ = thread_without_signals(call);
      return;
    } catch (const std::system_error&) {  // too many threads
    }
  }
  call();
}

std::optional<JobFailure> TcpControl::own_failure() const {
  const std::lock_guard lock(mutex_);
  return own_failure_;
}

// ---- Words -----------------------------------------------------------------------------------

std::string describe_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (last == i + 1) last = i;  // "3, 4" rather than "3-4"
    text += fmt::format("{}{}", text.empty() ? "" : ", ", ranks[i]);
    if (last > i) text += fmt::format("-{}", ranks[last]);
    i = last + 1;
  }
  return text;
}

}  // namespace sbtrain::control
