#include "train/signals.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string_view>

#include "core/error.h"
#include "core/pinned_memory.h"

namespace sbtrain {

namespace {

constexpr std::array<int, 4> kSignals = {SIGTERM, SIGUSR1, SIGINT, SIGUSR2};

// Handlers may access only lock-free atomics of static storage duration.
std::atomic<bool> installed{false};
std::atomic<int> stop_signal{0};
std::atomic<bool> interrupted{false};
std::atomic<bool> save_flag{false};
std::atomic<double*> shown{nullptr};  // see StopSignals::flags
static_assert(std::atomic<int>::is_always_lock_free && std::atomic<bool>::is_always_lock_free &&
              std::atomic<double*>::is_always_lock_free &&
              std::atomic_ref<double>::is_always_lock_free);

enum Flag : uint8_t { kStop, kSave, kFlags };

void show(Flag flag, bool value) {
  if (double* flags = shown) std::atomic_ref<double>(flags[flag]).store(value ? 1 : 0);
}

void on_interrupt() {
  if (interrupted.exchange(true)) {
    ::signal(SIGINT, SIG_DFL);
    ::raise(SIGINT);  // taken when this handler returns and SIGINT is unblocked
    return;
  }
  constexpr std::string_view kMessage =
      "\nfinishing the step, then saving; Ctrl-C again ends at once without saving\n";
  // It is for who has pressed the keys; of several ranks, only rank 0 has the terminal.
  if (::isatty(STDERR_FILENO) == 0) return;
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, kMessage.data(), kMessage.size());
}

void handle(int number) {
  const int saved_errno = errno;
  if (number == SIGUSR2) {
    save_flag = true;
    show(kSave, true);
  } else {
    int none = 0;
    stop_signal.compare_exchange_strong(none, number);
    show(kStop, true);
    if (number == SIGINT) on_interrupt();
  }
  errno = saved_errno;
}

void change_mask(int how) {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : kSignals) sigaddset(&set, number);
  pthread_sigmask(how, &set, nullptr);
}

}  // namespace

void hold_stop_signals() {
  change_mask(SIG_BLOCK);
}

void release_stop_signals() {
  change_mask(SIG_UNBLOCK);
}

StopSignals::StopSignals() {
  static_assert(kSignals.size() == kHandled);
  require(!installed.exchange(true), "StopSignals exists already");
  stop_signal = 0;
  interrupted = false;
  save_flag = false;
  show(kStop, false);
  show(kSave, false);
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &action, &previous_[i]);
  release_stop_signals();
}

StopSignals::~StopSignals() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous_[i], nullptr);
  installed = false;
}

StopSignals& training_signals() {
  static StopSignals& signals = *new StopSignals;
  return signals;
}

int StopSignals::signal() const {
  return stop_signal;
}

// A signal between the two shows as one more request, which does no harm.
bool StopSignals::save_requested() {
  show(kSave, false);
  return save_flag.exchange(false);
}

const double* StopSignals::flags(Backend backend) {
  // Never freed, since a handler may be about to write there.
  static const PinnedMemory& memory =
      *new PinnedMemory(backend, kFlags * sizeof(double), "what signals ask for");
  shown = reinterpret_cast<double*>(memory.data());
  if (stop_signal != 0) show(kStop, true);
  if (save_flag) show(kSave, true);
  return shown;
}

}  // namespace sbtrain
