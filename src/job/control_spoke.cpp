#include "job/control_spoke.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/host_name.h"
#include "job/root_watch.h"
#include "job/secret.h"

namespace sbtrain::control {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kConnectPatience{5};
// Rank 0 answers at once; what accepts a connection and says nothing is another program.
constexpr std::chrono::seconds kGreetPatience{30};
constexpr std::chrono::seconds kEndPatience{5};
constexpr size_t kResultMargin = size_t{1} << 20;  // for what a message holds besides the texts
// How long a rank that is asked to stop tries to tell rank 0, which may be about to listen.
constexpr std::chrono::seconds kStopPatience{5};
constexpr const char* kStoppedEarly =
    "asked to stop before all ranks were there; nothing has been done";
constexpr std::chrono::milliseconds kFirstPause{20};
constexpr std::chrono::milliseconds kLongestPause{1000};

double in_seconds(std::chrono::milliseconds t) {
  return static_cast<double>(t.count()) / 1000;
}

}  // namespace

SpokeControl::SpokeControl(const Launch& launch, const Deadlines& deadlines)
    : TcpControl(launch.rank, launch.world, deadlines),
      launch_(launch),
      root_(fmt::format("{}:{}", launch.address, launch.port)) {
  if (!join()) return;
  start_thread();
  wait_for_start();
}

// Rank 0 may come later, and an earlier job may still hold its port, so what fails is tried again
// until the deadline.
bool SpokeControl::join() {
  Clock::time_point deadline = Clock::now() + deadlines_.rendezvous;
  std::string problem;
  auto pause = kFirstPause;
  bool stopped = false;
  RootWatch root(launch_);
  do {
    if (!stopped && stopped_early()) {
      stopped = true;
      deadline = std::min(deadline, Clock::now() + kStopPatience);
    }
    FileDescriptor socket;
    if (find_secret(problem)) {
      socket = connect_to(launch_.address, launch_.port, kConnectPatience, problem);
    }
    if (socket.get() >= 0) {
      connection_ = std::make_unique<Connection>(std::move(socket), kLargestResult + kResultMargin);
      if (greet(deadline, problem)) return true;
      connection_.reset();
      if (failure()) return false;
    } else if (!stopped && root.ended()) {
      note_failure({.message = fmt::format("rank 0 has ended before it listened at {}: see its own "
                                           "output",
                                           root_)},
                   /*shows=*/rank_ == 1);
      return false;
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  } while (Clock::now() < deadline);
  if (stopped) {
    note_failure({.code = ExitCode::kPreempted, .message = kStoppedEarly}, /*shows=*/rank_ == 1);
    return false;
  }
  note_failure({.message = fmt::format("rank {} could not reach rank 0 at {} within {} s: {}; see "
                                       "whether rank 0 has started, and that MASTER_ADDR and "
                                       "MASTER_PORT name its machine and a port open to this one",
                                       rank_, root_, in_seconds(deadlines_.rendezvous), problem)},
               /*shows=*/true);
  return false;
}

// A file with the secret may be that of an earlier start, so it is read before each try.
bool SpokeControl::find_secret(std::string& problem) {
  if (!launch_.secret_file.empty()) {
    secret_ = read_secret(launch_.secret_file, problem);
    return !secret_.empty();
  }
  secret_ = launch_.secret.empty() ? launch_.token : launch_.secret;
  return true;
}

// Introduces this rank. True once rank 0 has accepted it.
bool SpokeControl::greet(Clock::time_point deadline, std::string& problem) {
  hello_ = Hello{.nonce = random_secret(),
                 .rank = static_cast<uint32_t>(rank_),
                 .world = static_cast<uint32_t>(world_),
                 .host = host_name(),
                 .pid = static_cast<uint32_t>(::getpid())};
  challenge_ = {};
  connection_->send(hello_);
  deadline = std::min(deadline, Clock::now() + kGreetPatience);
  problem.clear();
  while (Clock::now() < deadline) {
    if (!connection_->flush()) break;
    pollfd ready{connection_->fd(), POLLIN, 0};
    ::poll(&ready, 1, static_cast<int>(interval().count()));
    std::vector<Message> messages;
    const bool open = connection_->receive(messages);
    while (!messages.empty()) {
      const Message message = std::move(messages.front());
      messages.erase(messages.begin());
      switch (answer(message, problem)) {
        case Answer::kNext:
          continue;
        case Answer::kRefused:
          return false;
        case Answer::kAccepted:
          break;
      }
      heard_ = now();
      for (Message& more : messages) handle(std::move(more));
      if (!open && !failed_) lose("its connection has closed");
      return true;
    }
    if (!open) {
      problem = "it closes the connection";
      break;
    }
  }
  if (problem.empty()) problem = "it accepts the connection, but does not answer";
  return false;
}

// What comes before this rank belongs to the job, perhaps from a stranger.
SpokeControl::Answer SpokeControl::answer(const Message& message, std::string& problem) {
  if (const Refusal* refusal = std::get_if<Refusal>(&message)) {
    const std::string reason = clean_text(refusal->reason);
    problem = "it was refused: " + reason;
    if (!refusal->retry) {
      note_failure(
          {.message = fmt::format("rank {}: refused by rank 0 at {}: {}", rank_, root_, reason)},
          /*shows=*/true);
    }
    return Answer::kRefused;
  }
  if (const Challenge* challenge = std::get_if<Challenge>(&message); challenge && !challenge_) {
    challenge_ = *challenge;
    connection_->send(Proof{.proof = proof_of_rank(secret_, hello_, *challenge_)});
    return Answer::kNext;
  }
  const Welcome* welcome = std::get_if<Welcome>(&message);
  if (welcome != nullptr && challenge_ &&
      equal_texts(welcome->proof, proof_of_root(secret_, hello_, *challenge_))) {
    return Answer::kAccepted;
  }
  problem = "another program answers there";
  return Answer::kRefused;
}

void SpokeControl::turn() {
  pollfd polled[2] = {{wake_fd(), POLLIN, 0}, {-1, 0, 0}};
  if (connection_) {
    polled[1] = {connection_->fd(),
                 static_cast<short>(POLLIN | (connection_->has_output() ? POLLOUT : 0)), 0};
  }
  ::poll(polled, 2, static_cast<int>(interval().count()));
  tick();
  std::vector<Message> output = take_outbox();
  if (!connection_) return;
  if (failed_) return await_end();
  for (const Message& message : output) connection_->send(message);
  if (!std::exchange(told_to_stop_, told_to_stop_ || stopped_early()) && told_to_stop_) {
    connection_->send(
        Failure{.code = static_cast<uint32_t>(ExitCode::kPreempted), .message = kStoppedEarly});
  }
  if (now() >= next_beat_ && !connection_->has_output()) {
    next_beat_ = now() + deadlines_.heartbeat;
    connection_->send(beat());
  }
  bool open = connection_->flush();
  std::vector<Message> messages;
  open = connection_->receive(messages) && open;
  if (!messages.empty()) heard_ = now();
  for (Message& message : messages) handle(std::move(message));
  if (!connection_ || failed_) return;
  if (!open) return lose("its connection has closed");
  if (now() - heard_ > deadlines_.progress) {
    lose(fmt::format("no answer for {} s: stopped, or not to be reached",
                     in_seconds(deadlines_.progress)));
  }
}

// After the end or a failure there is nothing more to say, and rank 0 waits until this rank says
// so.
void SpokeControl::handle(Message message) {
  if (std::holds_alternative<Start>(message)) {
    note_start();
  } else if (Texts* texts = std::get_if<Texts>(&message)) {
    deliver(std::move(*texts));
  } else if (std::holds_alternative<End>(message)) {
    note_end();
    connection_.reset();
  } else if (const Failure* failure = std::get_if<Failure>(&message)) {
    failed_ = true;
    note_failure({.code = static_cast<ExitCode>(failure->code), .message = failure->message},
                 /*shows=*/false);
    connection_->end_output();
  }
}

// If this rank is telling rank 0 why it fails, that is the reason, and nobody else can show it.
// Otherwise all ranks lose rank 0 at the same time, and rank 1 says so.
void SpokeControl::lose(const std::string& why) {
  connection_.reset();
  if (const std::optional<JobFailure> own = own_failure()) {
    return note_failure(*own, /*shows=*/true);
  }
  note_failure({.message = fmt::format("rank 0 at {} is gone: {}", root_, why)},
               /*shows=*/rank_ == 1);
}

// Rank 0 closes the connection when it has shown the failure.
void SpokeControl::await_end() {
  std::vector<Message> ignored;
  if (!connection_->receive(ignored)) connection_.reset();
}

// A rank that goes without finish() or report() is gone for the others as soon as its connection
// closes. After a failure it goes when rank 0 has ended, unless that takes long: some launchers end
// all ranks as soon as one has ended, and rank 0 has to show why.
void SpokeControl::close() {
  const Clock::time_point deadline = Clock::now() + kEndPatience;
  while (failed_ && connection_ && Clock::now() < deadline) {
    pollfd ready{connection_->fd(), POLLIN, 0};
    ::poll(&ready, 1, static_cast<int>(interval().count()));
    await_end();
  }
  if (connection_) connection_->flush();
  connection_.reset();
}

}  // namespace sbtrain::control
