#include "job/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "core/file_descriptor.h"
#include "core/standard_streams.h"
#include "job/control_socket.h"
#include "job/launch.h"
#include "job/secret.h"
#include "job/tcp_control.h"

namespace sbtrain {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::array<int, 4> kForwarded = {SIGTERM, SIGINT, SIGUSR1, SIGUSR2};
constexpr std::array<int, 3> kOwn = {SIGCHLD, SIGTSTP, SIGCONT};
constexpr const char* kProgram = "/proc/self/exe";
constexpr int kCannotRun = 127;  // as of a shell

bool forwarded(int signal) {
  return std::ranges::count(kForwarded, signal) > 0;
}

// ---- Signals ---------------------------------------------------------------------------------

std::atomic<int> signal_pipe{-1};  // handlers may access nothing else

void write_signal(int signal) {
  const int saved = errno;
  const auto byte = static_cast<char>(signal);
  [[maybe_unused]] const ssize_t n = ::write(signal_pipe, &byte, 1);
  errno = saved;
}

std::pair<FileDescriptor, FileDescriptor> make_pipe() {
  int fds[2] = {-1, -1};
  if (::pipe2(fds, O_CLOEXEC | O_NONBLOCK) != 0) {
    fail(ExitCode::kInternal, "no pipe: {}", std::generic_category().message(errno));
  }
  return {FileDescriptor(fds[0]), FileDescriptor(fds[1])};
}

// Signals arrive as bytes that poll() sees, whichever thread the system interrupts. They are taken
// even if the caller has blocked them.
class SignalPipe {
 public:
  SignalPipe() {
    std::tie(read_, write_) = make_pipe();
    signal_pipe = write_.get();
    struct sigaction action {};
    action.sa_handler = write_signal;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigset_t taken;
    sigemptyset(&taken);
    const auto take = [&](int signal) {
      sigaction(signal, &action, &previous_[signal]);
      sigaddset(&taken, signal);
    };
    std::ranges::for_each(kForwarded, take);
    std::ranges::for_each(kOwn, take);
    pthread_sigmask(SIG_UNBLOCK, &taken, &mask_);
  }
  ~SignalPipe() {
    pthread_sigmask(SIG_SETMASK, &mask_, nullptr);
    for (const auto& [signal, action] : previous_) sigaction(signal, &action, nullptr);
    signal_pipe = -1;
  }
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

  int fd() const { return read_.get(); }
  // What the caller of supervise() had blocked, and its ranks have from the start: a signal that
  // comes before they have handlers then waits for them.
  const sigset_t& callers_mask() const { return mask_; }
  std::vector<int> take() const {
    std::vector<int> signals;
    char byte = 0;
    while (::read(read_.get(), &byte, 1) == 1) signals.push_back(byte);
    return signals;
  }

 private:
  FileDescriptor read_;
  FileDescriptor write_;
  std::map<int, struct sigaction> previous_;
  sigset_t mask_{};
};

// ---- Ranks -----------------------------------------------------------------------------------

struct Rank {
  pid_t pid = -1;
  bool running = false;
  bool killed = false;    // by the supervisor
  int status = 0;         // of waitpid, once it has ended
  FileDescriptor output;  // what it writes; none of rank 0
  std::string line;       // what it has written of a line that has not ended
};

FileDescriptor listen_locally(std::string& address) {
  try {
    address = "127.0.0.1";
    return control::listen_on(address, 0);
  } catch (const Error&) {  // a machine with IPv6 alone
    address = "::1";
    return control::listen_on(address, 0);
  }
}

// The strings of an exec, made before the fork: between fork and exec a process that had threads
// may not allocate.
class Strings {
 public:
  explicit Strings(std::vector<std::string> texts) : texts_(std::move(texts)) {
    for (std::string& text : texts_) pointers_.push_back(text.data());
    pointers_.push_back(nullptr);
  }
  char* const* data() const { return pointers_.data(); }

 private:
  std::vector<std::string> texts_;
  std::vector<char*> pointers_;
};

class Supervisor {
 public:
  explicit Supervisor(const SupervisorOptions& options)
      : options_(options), ranks_(static_cast<size_t>(options.ranks)) {
    listener_ = listen_locally(address_);
  }
  ~Supervisor() { kill_rest(); }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  ExitCode run() {
    for (int rank = 0; rank < options_.ranks; ++rank) start(rank);
    // Once rank 0 has ended, connecting must fail.
    listener_.reset();
    while (running() > 0) turn();
    for (int rank = 0; rank < options_.ranks; ++rank) show_output(rank);
    return result();
  }

  // The signal that has ended a rank and was meant for the whole job, or 0.
  int deadly_signal() const { return deadly_signal_; }

 private:
  void start(int rank);
  [[noreturn]] void become(int rank, int output, const Strings& arguments,
                           const Strings& environment, pid_t supervisor) const;
  std::vector<std::string> environment_of(int rank) const;
  void turn();
  void take_signals();
  void stop_and_continue();
  void reap();
  void note_end(int rank);
  void enforce_grace();
  void kill_stopped();
  void kill_rank(int rank);
  void kill_rest();
  void send(int signal);
  void show_output(int rank);
  void show_lines(int rank, bool all);
  ExitCode result() const;
  int running() const {
    return static_cast<int>(std::ranges::count_if(ranks_, [](const Rank& r) { return r.running; }));
  }

  const SupervisorOptions& options_;
  const std::string token_ = control::random_secret();
  std::string address_;
  FileDescriptor listener_;
  SignalPipe signals_;
  std::vector<Rank> ranks_;
  std::optional<ExitCode> failure_;
  std::optional<Clock::time_point> patience_;  // until the rest is killed
  std::vector<int> sent_;                      // signals that have been passed on
  int deadly_signal_ = 0;
  bool given_up_ = false;  // the grace period is over
};

std::vector<std::string> Supervisor::environment_of(int rank) const {
  Environment variables = process_environment();
  // What an outer launcher may have left says nothing about these ranks.
  std::erase_if(variables, [](const auto& v) { return v.first.starts_with("TORCHELASTIC_"); });
  variables["RANK"] = variables["LOCAL_RANK"] = std::to_string(rank);
  variables["WORLD_SIZE"] = variables["LOCAL_WORLD_SIZE"] = std::to_string(options_.ranks);
  variables["GROUP_RANK"] = "0";
  variables["GROUP_WORLD_SIZE"] = "1";
  variables["MASTER_ADDR"] = address_;
  variables["MASTER_PORT"] = std::to_string(control::port_of(listener_.get()));
  variables[kSupervisorToken] = token_;
  if (rank == 0) variables[kSupervisorListener] = std::to_string(listener_.get());
  // The ranks share the processors.
  const unsigned share =
      std::thread::hardware_concurrency() / static_cast<unsigned>(options_.ranks);
  variables.try_emplace("OMP_NUM_THREADS", std::to_string(std::max(1U, share)));
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) entries.push_back(fmt::format("{}={}", name, value));
  return entries;
}

void Supervisor::start(int rank) {
  std::vector<std::string> texts = options_.arguments;
  texts.insert(texts.begin(), "sbtrain");
  const Strings arguments(std::move(texts));
  const Strings environment(environment_of(rank));
  auto [read, write] = make_pipe();
  ::fcntl(write.get(), F_SETFL, 0);  // ranks wait when the supervisor is slow to read
  const pid_t self = ::getpid();
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = ::fork();
  if (pid == 0) become(rank, rank == 0 ? -1 : write.get(), arguments, environment, self);
  const int error = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) {
    fail(ExitCode::kOutOfMemory,
         "cannot start rank {}: {}; the limit on processes (ulimit -u) may "
         "be too low",
         rank, std::generic_category().message(error));
  }
  ranks_[rank].pid = pid;
  ranks_[rank].running = true;
  if (rank > 0) ranks_[rank].output = std::move(read);
}

// In the new process; only calls that are safe in a copy of a process with threads.
void Supervisor::become(int rank, int output, const Strings& arguments, const Strings& environment,
                        pid_t supervisor) const {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != supervisor) ::_exit(kCannotRun);  // it has died before the line above
  const int nothing = ::open("/dev/null", O_RDONLY);
  if (nothing >= 0) ::dup2(nothing, STDIN_FILENO);
  if (output >= 0) {
    ::dup2(output, STDOUT_FILENO);
    ::dup2(output, STDERR_FILENO);
  } else {
    ::fcntl(listener_.get(), F_SETFD, 0);
  }
  for (const int signal : kForwarded) ::signal(signal, SIG_DFL);
  for (const int signal : kOwn) ::signal(signal, SIG_DFL);
  // Output to the terminal of another process group must not stop rank 0.
  ::signal(SIGTTOU, SIG_IGN);
  ::sigprocmask(SIG_SETMASK, &signals_.callers_mask(), nullptr);
  ::execve(kProgram, arguments.data(), environment.data());
  constexpr char kMessage[] = "error: cannot run /proc/self/exe\n";
  [[maybe_unused]] const ssize_t n = ::write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  ::_exit(kCannotRun);
}

void Supervisor::turn() {
  std::vector<pollfd> polled = {{signals_.fd(), POLLIN, 0}};
  for (const Rank& rank : ranks_) {
    if (rank.output.get() >= 0) polled.push_back({rank.output.get(), POLLIN, 0});
  }
  int wait = -1;
  if (patience_) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(*patience_ - Clock::now());
    wait = static_cast<int>(std::max<int64_t>(left.count() + 1, 0));
  }
  ::poll(polled.data(), polled.size(), wait);
  for (int rank = 0; rank < options_.ranks; ++rank) show_output(rank);
  take_signals();
  enforce_grace();
}

void Supervisor::take_signals() {
  for (const int signal : signals_.take()) {
    if (signal == SIGCHLD) {
      reap();
    } else if (signal == SIGTSTP) {
      stop_and_continue();
    } else if (signal == SIGCONT) {
      send(SIGCONT);
    } else {
      sent_.push_back(signal);
      send(signal);
    }
  }
}

void Supervisor::stop_and_continue() {
  send(SIGSTOP);
  ::raise(SIGSTOP);  // until somebody continues this process
  send(SIGCONT);
}

void Supervisor::send(int signal) {
  for (const Rank& rank : ranks_) {
    if (rank.running) ::kill(rank.pid, signal);
  }
}

void Supervisor::reap() {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    Rank& r = ranks_[rank];
    if (!r.running || ::waitpid(r.pid, &r.status, WNOHANG) != r.pid) continue;
    r.running = false;
    show_output(rank);
    note_end(rank);
  }
}

void Supervisor::note_end(int rank) {
  const Rank& r = ranks_[rank];
  std::optional<ExitCode> failure;
  if (WIFSIGNALED(r.status)) {
    const int signal = WTERMSIG(r.status);
    if (forwarded(signal) && std::ranges::count(sent_, signal) > 0) {
      deadly_signal_ = signal;
    } else if (!r.killed) {
      print_error("rank {} (pid {}) was killed by signal {} ({}){}\n", rank, r.pid, signal,
                  ::strsignal(signal), signal == SIGKILL ? ", perhaps for lack of memory" : "");
    }
    failure = ExitCode::kCommunication;
  } else {
    const auto code = static_cast<ExitCode>(WEXITSTATUS(r.status));
    if (code != ExitCode::kDone && code != ExitCode::kPreempted) failure = code;
  }
  if (failure && !failure_) failure_ = failure;
  // Ranks end together, whether well or badly; those that do not are stuck.
  if (patience_) return;
  patience_ = Clock::now() + options_.grace;
  if (failure_) kill_stopped();
  send(SIGCONT);  // a rank that somebody has stopped could not end by itself
}

// The others have lost these. Continued, they would find that the others are gone, and tell of that
// as of another failure.
void Supervisor::kill_stopped() {
  for (int rank = 0; rank < options_.ranks; ++rank) {
    siginfo_t info{};
    const Rank& r = ranks_[rank];
    if (!r.running ||
        ::waitid(P_PID, static_cast<id_t>(r.pid), &info, WSTOPPED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid != r.pid) {
      continue;
    }
    print_error("rank {} (pid {}) was stopped: killed\n", rank, r.pid);
    kill_rank(rank);
  }
}

void Supervisor::kill_rank(int rank) {
  ranks_[rank].killed = true;
  ::kill(ranks_[rank].pid, SIGKILL);
}

void Supervisor::enforce_grace() {
  if (!patience_ || Clock::now() < *patience_ || running() == 0) return;
  std::vector<int> stuck;
  for (int rank = 0; rank < options_.ranks; ++rank) {
    if (ranks_[rank].running) stuck.push_back(rank);
  }
  const std::string names =
      fmt::format("rank{} {}", stuck.size() == 1 ? "" : "s", control::describe_ranks(stuck));
  if (std::exchange(given_up_, true)) {
    // A process that waits for a device or a file system ends when the system lets it.
    print_error("{} cannot be killed now; the system ends them later\n", names);
    for (const int rank : stuck) ranks_[rank].running = false;
    return;
  }
  print_error("{} did not end within {} s after another rank had: killed\n", names,
              static_cast<double>(options_.grace.count()) / 1000);
  for (const int rank : stuck) kill_rank(rank);
  if (!failure_) failure_ = ExitCode::kCommunication;
  patience_ = Clock::now() + options_.grace;
}

// After an exception; no rank outlives the supervisor.
void Supervisor::kill_rest() {
  for (Rank& rank : ranks_) {
    if (!rank.running) continue;
    ::kill(rank.pid, SIGKILL);
    ::waitpid(rank.pid, nullptr, 0);
  }
}

// Reads what the rank has written so far.
void Supervisor::show_output(int rank) {
  Rank& r = ranks_[rank];
  if (r.output.get() < 0) return;
  std::array<char, 4096> part;
  for (;;) {
    const ssize_t n = ::read(r.output.get(), part.data(), part.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) {
      r.output.reset();
      break;
    }
    r.line.append(part.data(), static_cast<size_t>(n));
    show_lines(rank, /*all=*/false);
  }
  show_lines(rank, /*all=*/r.output.get() < 0 || !r.running);
}

void Supervisor::show_lines(int rank, bool all) {
  constexpr size_t kLongestLine = 1 << 16;
  // A line of rank 0 that is redrawn in place makes room.
  static const char* const clear = ::isatty(STDERR_FILENO) != 0 ? "\r\x1b[K" : "";
  std::string& text = ranks_[rank].line;
  for (;;) {
    size_t end = text.find('\n');
    if (end == std::string::npos && (all || text.size() > kLongestLine)) end = text.size();
    if (end == std::string::npos || text.empty()) return;
    if (end > 0) print_error("{}rank {}: {}\n", clear, rank, text.substr(0, end));
    text.erase(0, end + 1);
  }
}

ExitCode Supervisor::result() const {
  if (failure_) return *failure_;
  const bool preempted = std::ranges::any_of(ranks_, [](const Rank& r) {
    return WEXITSTATUS(r.status) == static_cast<int>(ExitCode::kPreempted);
  });
  return preempted ? ExitCode::kPreempted : ExitCode::kDone;
}

}  // namespace

ExitCode supervise(const SupervisorOptions& options) {
  int signal = 0;
  ExitCode code = ExitCode::kDone;
  {
    Supervisor supervisor(options);
    code = supervisor.run();
    signal = supervisor.deadly_signal();
  }
  if (signal != 0) {
    ::signal(signal, SIG_DFL);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, signal);
    pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
    ::raise(signal);
  }
  return code;
}

}  // namespace sbtrain
