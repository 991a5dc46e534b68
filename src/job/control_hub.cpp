#include "job/control_hub.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>

#include "core/error.h"
#include "core/host_name.h"
#include "core/log.h"
#include "job/secret.h"

namespace sbtrain::control {
namespace {

constexpr std::chrono::seconds kHelloPatience{10};
constexpr size_t kLargestHello = 4096;
constexpr size_t kMargin = size_t{1} << 20;  // for what a message holds besides a text
constexpr size_t kMostGuests = 256;          // in addition to one for each rank
// How long rank 0 waits, when it ends, for the others to have read its last words.
constexpr std::chrono::seconds kFarewell{3};

double seconds(Time t) {
  return static_cast<double>(t.count()) / 1000;
}

std::string name_ranks(const std::vector<int>& ranks) {
  return fmt::format("rank{} {}", ranks.size() == 1 ? "" : "s", describe_ranks(ranks));
}

bool local(const Launch& launch) {
  return launch.nodes == 1 && (launch.address == "127.0.0.1" || launch.address == "::1" ||
                               launch.address == "localhost");
}

FileDescriptor open_listener(const Launch& launch) {
  if (launch.listener >= 0) {
    FileDescriptor inherited(launch.listener);
    ::fcntl(inherited.get(), F_SETFD, FD_CLOEXEC);
    ::fcntl(inherited.get(), F_SETFL, O_NONBLOCK);
    return inherited;
  }
  // A job of one machine is not to be reached from others. MASTER_ADDR may name an address that
  // only the other machines see, so a job of several listens on all.
  return listen_on(local(launch) ? launch.address : "", launch.port);
}

}  // namespace

HubControl::HubControl(const Launch& launch, const Deadlines& deadlines)
    : TcpControl(0, launch.world, deadlines),
      secret_(launch.secret.empty() ? launch.token : launch.secret),
      peers_(static_cast<size_t>(launch.world)) {
  try {
    listener_ = open_listener(launch);
    if (!launch.secret_file.empty()) {
      secret_ = random_secret();
      write_secret(launch.secret_file, secret_);
      secret_file_ = launch.secret_file;
    }
  } catch (const Error& error) {
    note_failure({.code = error.code(), .message = error.what()}, /*shows=*/true);
    return;
  }
  peers_[0].present = true;
  peers_[0].host = host_name();
  peers_[0].pid = static_cast<uint32_t>(::getpid());
  start_thread();
  wait_for_start();
}

void HubControl::turn() {
  wait_for_sockets();
  tick();
  now_ = now();
  admit();
  read_guests();
  read_peers();
  for (Message& message : take_outbox()) handle(0, std::move(message));
  hear(0, beat());
  start_if_complete();
  watch();
  send_beats();
  flush();
}

void HubControl::wait_for_sockets() {
  std::vector<pollfd> polled = {{wake_fd(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
  const auto add = [&](const Connection& c) {
    polled.push_back({c.fd(), static_cast<short>(POLLIN | (c.has_output() ? POLLOUT : 0)), 0});
  };
  for (const Guest& guest : guests_) add(guest.connection);
  for (const Peer& peer : peers_) {
    if (peer.talks()) add(*peer.connection);
  }
  ::poll(polled.data(), polled.size(), static_cast<int>(interval().count()));
}

// ---- Joining ---------------------------------------------------------------------------------

void HubControl::admit() {
  for (;;) {
    FileDescriptor socket = accept_from(listener_.get());
    if (socket.get() < 0) return;
    if (guests_.size() >= kMostGuests + peers_.size()) guests_.erase(guests_.begin());
    guests_.push_back({.connection = Connection(std::move(socket), kLargestHello), .since = now_});
  }
}

void HubControl::read_guests() {
  std::vector<Guest> staying;
  for (Guest& guest : guests_) {
    std::vector<Message> messages;
    const bool open = guest.connection.receive(messages);
    const auto stays = [&](const Message& message) {
      return guest.leaving || greet(guest, message);
    };
    if (!std::ranges::all_of(messages, stays)) continue;
    const bool late = now_ - guest.since > kHelloPatience;
    if (open && !late) staying.push_back(std::move(guest));
  }
  guests_ = std::move(staying);
}

// A guest says hello, and then proves that it knows the secret; what else it wants to know, such as
// which ranks are there, it learns only then. False: the connection is no guest any more.
bool HubControl::greet(Guest& guest, const Message& message) {
  if (!guest.challenge) {
    const Hello* hello = std::get_if<Hello>(&message);
    if (hello == nullptr || hello->magic != Hello{}.magic) return false;
    guest.hello = *hello;
    if (hello->version != kProtocolVersion) {
      refuse(guest,
             {fmt::format("rank 0 speaks version {} of the control protocol, rank {} version "
                          "{}: all ranks must run the same build",
                          kProtocolVersion, hello->rank, hello->version)});
      return true;
    }
    guest.challenge = Challenge{.nonce = random_secret()};
    guest.connection.send(*guest.challenge);
    return true;
  }
  const Proof* proof = std::get_if<Proof>(&message);
  if (proof == nullptr) return false;
  if (!equal_texts(proof->proof, proof_of_rank(secret_, guest.hello, *guest.challenge))) {
    refuse(guest, {.reason = "it belongs to another job", .retry = true});
    return true;
  }
  if (const std::optional<Refusal> refusal = objection(guest.hello)) {
    refuse(guest, *refusal);
    return true;
  }
  welcome(guest);
  return false;
}

void HubControl::refuse(Guest& guest, const Refusal& refusal) {
  log_refusal(guest, refusal.reason);
  guest.connection.send(refusal);
  guest.leaving = true;
}

void HubControl::log_refusal(const Guest& guest, const std::string& reason) {
  constexpr size_t kMostLogged = 100;
  const Hello& hello = guest.hello;
  const std::string who =
      fmt::format("pid {} on {}, rank {}", hello.pid, clean_text(hello.host), hello.rank);
  if (refused_.size() >= kMostLogged || !refused_.insert(who).second) return;
  log_warning("refused a connection from {} ({}): {}", peer_name(guest.connection.fd()), who,
              reason);
}

std::optional<Refusal> HubControl::objection(const Hello& hello) const {
  if (hello.world != static_cast<uint32_t>(world_)) {
    return Refusal{fmt::format("rank 0 was started as one of {} ranks, rank {} as one of {}",
                               world_, hello.rank, hello.world)};
  }
  if (hello.rank == 0 || hello.rank >= hello.world) {
    return Refusal{fmt::format("rank {} cannot join rank 0 of {} ranks", hello.rank, world_)};
  }
  const Peer& peer = peers_[hello.rank];
  if (peer.present) {
    return Refusal{
        fmt::format("rank {} is there already: pid {} on {}", hello.rank, peer.pid, peer.host)};
  }
  return std::nullopt;
}

void HubControl::welcome(Guest& guest) {
  const Hello& hello = guest.hello;
  Peer& peer = peers_[hello.rank];
  peer.connection = std::make_unique<Connection>(std::move(guest.connection));
  peer.connection->set_largest_frame(kLargestText + kMargin);
  peer.present = true;
  peer.host = clean_text(hello.host);
  peer.pid = hello.pid;
  peer.heard = now_;
  peer.connection->send(Welcome{.proof = proof_of_root(secret_, hello, *guest.challenge)});
  // A rank that comes after the job has failed learns why.
  if (const std::optional<JobFailure> failed = failure()) {
    peer.connection->send(Failure{static_cast<uint32_t>(failed->code), failed->message});
  }
}

void HubControl::start_if_complete() {
  if (started_ || failed_ || !select([](const Peer& p) { return !p.present; }).empty()) return;
  started_ = true;
  remove_secret();
  for (Peer& peer : peers_) peer.progressed = now_;
  send_to_all(Start{});
  note_start();
}

void HubControl::remove_secret() {
  if (!secret_file_.empty()) ::unlink(secret_file_.c_str());
  secret_file_.clear();
}

// ---- Messages --------------------------------------------------------------------------------

void HubControl::read_peers() {
  for (int rank = 1; rank < world_; ++rank) {
    Peer& peer = peers_[rank];
    if (!peer.talks()) continue;
    std::vector<Message> messages;
    const bool open = peer.connection->receive(messages);
    if (!messages.empty()) peer.heard = now_;
    for (Message& message : messages) handle(rank, std::move(message));
    if (!open && peer.talks()) lose(rank);
  }
}

void HubControl::handle(int rank, Message message) {
  if (Beat* beat = std::get_if<Beat>(&message)) {
    hear(rank, std::move(*beat));
  } else if (Texts* texts = std::get_if<Texts>(&message)) {
    gather(rank, std::move(*texts));
  } else if (const Failure* failure = std::get_if<Failure>(&message)) {
    const std::string who = rank == 0 ? "" : name(rank) + ": ";
    const auto code = static_cast<ExitCode>(failure->code);
    fail_job(code == ExitCode::kDone ? ExitCode::kInternal : code, who + failure->message);
  } else if (std::holds_alternative<Finished>(message)) {
    finish_rank(rank);
  }
}

void HubControl::hear(int rank, Beat beat) {
  Peer& peer = peers_[rank];
  peer.heard = now_;
  if (started_) peer.progressed = std::max(peer.progressed, now_ - Time(beat.age_ms));
  peer.allowed_until = beat.allowance_ms > 0 ? now_ + Time(beat.allowance_ms) : Time(0);
  peer.last = std::move(beat);
}

void HubControl::gather(int rank, Texts texts) {
  const auto at = std::ranges::find(texts.members, static_cast<uint32_t>(rank));
  const bool valid = at != texts.members.end() && texts.texts.size() == 1 &&
                     std::ranges::is_sorted(texts.members, std::ranges::less_equal{}) &&
                     texts.members.back() < static_cast<uint32_t>(world_);
  if (!valid || failed_) return;
  const auto [entry, is_new] =
      pending_.try_emplace({texts.topic, texts.members}, texts.members.size());
  Pending& pending = entry->second;
  pending[at - texts.members.begin()].push_back(std::move(texts.texts.front()));
  if (std::ranges::any_of(pending, &std::deque<std::string>::empty)) return watch_exchanges();
  texts.texts.clear();
  for (std::deque<std::string>& queue : pending) {
    texts.texts.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  if (std::ranges::all_of(pending, &std::deque<std::string>::empty)) pending_.erase(entry);
  size_t total = 0;
  for (const std::string& text : texts.texts) total += text.size();
  if (total > kLargestResult) {
    return fail_job(ExitCode::kInternal,
                    fmt::format("the exchange '{}' has {} bytes in all", texts.topic, total));
  }
  const Message result = texts;
  for (const uint32_t member : texts.members) {
    if (peers_[member].talks()) peers_[member].connection->send(result);
  }
  if (texts.members.front() == 0) deliver(std::move(texts));
}

void HubControl::finish_rank(int rank) {
  peers_[rank].finished = true;
  watch_exchanges();
  if (failed_ || !select([](const Peer& p) { return !p.finished; }).empty()) return;
  send_to_all(End{});
  note_end();
}

// A rank that is done comes to no exchange any more.
void HubControl::watch_exchanges() {
  if (failed_) return;
  for (const auto& [key, pending] : pending_) {
    for (size_t i = 0; i < pending.size(); ++i) {
      const int rank = static_cast<int>(key.second[i]);
      if (!pending[i].empty() || !peers_[rank].finished) continue;
      return fail_job(
          ExitCode::kCommunication,
          fmt::format("{} has ended, but others exchange '{}' with it", name(rank), key.first));
    }
  }
}

// ---- Failures --------------------------------------------------------------------------------

void HubControl::lose(int rank) {
  Peer& peer = peers_[rank];
  peer.left = true;
  if (failed_ || ended()) return;
  fail_job(
      ExitCode::kCommunication,
      fmt::format("rank {} (pid {} on {}) is gone: its connection has closed; the last that "
                  "it said, {:.1f} s ago, was '{}'",
                  rank, peer.pid, peer.host, seconds(now_ - peer.progressed), peer.last.doing));
}

void HubControl::fail_job(ExitCode code, const std::string& message) {
  if (failed_ || ended()) return;
  failed_ = true;
  pending_.clear();
  send_to_all(Failure{static_cast<uint32_t>(code), message});
  flush();
  note_failure({.code = code, .message = message}, /*shows=*/true);
}

void HubControl::watch() {
  if (failed_ || ended()) return;
  if (!started_) watch_rendezvous();
  const std::vector<int> late = late_ranks();
  if (late.empty() || failed_) return;
  // A rank that does not run is the cause of whatever the others wait for.
  const std::vector<int> mute = select([this](const Peer& p) { return unresponsive(p); });
  const std::string ranks = mute.empty() ? name_ranks(late) : name_ranks(mute);
  const std::string what =
      mute.empty() ? fmt::format("no progress of {} for {} s (train.timeout)", ranks,
                                 seconds(deadlines_.progress))
                   : fmt::format("no answer from {}: stopped, or not to be reached", ranks);
  fail_job(ExitCode::kCommunication, what + describe_state() + describe_pending());
}

// Ranks that do not answer, or make no progress although no allowance excuses them.
std::vector<int> HubControl::late_ranks() {
  const auto allows = [this](const Peer& p) { return !p.finished && p.allowed_until > now_; };
  if (std::ranges::any_of(peers_, allows)) last_allowed_ = now_;
  return select([this](const Peer& p) {
    const bool idle = started_ && !p.finished &&
                      now_ - std::max(p.progressed, last_allowed_) > deadlines_.progress;
    return idle || (p.present && silent(p, deadlines_.progress));
  });
}

void HubControl::watch_rendezvous() {
  const std::vector<int> absent = select([](const Peer& p) { return !p.present; });
  if (now_ >= next_notice_) {
    next_notice_ = 4 * now_;
    log_info("waiting for {} of {}", name_ranks(absent), world_);
  }
  if (stopped_early()) {
    return fail_job(ExitCode::kPreempted,
                    fmt::format("asked to stop while {} of {} {} awaited; nothing has been done",
                                name_ranks(absent), world_, absent.size() == 1 ? "was" : "were"));
  }
  if (now_ <= deadlines_.rendezvous) return;
  fail_job(ExitCode::kCommunication,
           fmt::format("{} of {} did not come within {} s: see their own output, and that "
                       "their machines reach port {} of {}",
                       name_ranks(absent), world_, seconds(deadlines_.rendezvous),
                       port_of(listener_.get()), peers_[0].host));
}

// ---- Output ----------------------------------------------------------------------------------

void HubControl::send_beats() {
  if (now_ < next_beat_) return;
  next_beat_ = now_ + deadlines_.heartbeat;
  for (Peer& peer : peers_) {
    // A peer that does not read is not told more and more.
    if (peer.talks() && !peer.connection->has_output()) peer.connection->send(Beat{});
  }
}

void HubControl::flush() {
  for (Guest& guest : guests_) {
    if (guest.connection.has_output() && guest.connection.flush() && guest.leaving) {
      guest.connection.end_output();
    }
  }
  for (int rank = 1; rank < world_; ++rank) {
    Peer& peer = peers_[rank];
    if (peer.talks() && !peer.connection->flush()) lose(rank);
  }
}

void HubControl::send_to_all(const Message& message) {
  for (Peer& peer : peers_) {
    if (peer.talks()) peer.connection->send(message);
  }
}

// Peers say their last when they have read how the job ended; closing earlier could make the system
// discard what they have not read yet. When the job has failed, they wait in turn until this rank
// closes the connections, since it shows the message, and some launchers end all ranks as soon as
// one has ended.
void HubControl::close() {
  now_ = now();
  fail_job(ExitCode::kCommunication, "rank 0 has ended without saying why");
  listener_.reset();
  remove_secret();
  const auto awaited = [this](const Peer& p) { return p.talks() && !unresponsive(p); };
  const auto deadline = std::chrono::steady_clock::now() + kFarewell;
  while (!select(awaited).empty() && std::chrono::steady_clock::now() < deadline) {
    flush();
    std::vector<pollfd> polled;
    for (const Peer& peer : peers_) {
      if (!peer.talks()) continue;
      const bool more = peer.connection->has_output();
      polled.push_back(
          {peer.connection->fd(), static_cast<short>(POLLIN | (more ? POLLOUT : 0)), 0});
    }
    ::poll(polled.data(), polled.size(), static_cast<int>(interval().count()));
    read_peers();
  }
  for (Peer& peer : peers_) peer.connection.reset();
}

// ---- Words -----------------------------------------------------------------------------------

std::vector<int> HubControl::select(const std::function<bool(const Peer&)>& condition) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_; ++rank) {
    if (condition(peers_[rank])) ranks.push_back(rank);
  }
  return ranks;
}

std::string HubControl::name(int rank) const {
  const std::string& host = peers_[rank].host;
  return host == peers_[0].host ? fmt::format("rank {}", rank)
                                : fmt::format("rank {} on {}", rank, host);
}

// A line for each thing that ranks have said, with those that did; what was said longest ago comes
// first, since the other ranks probably wait for these.
std::string HubControl::describe_state() const {
  struct Said {
    std::vector<int> ranks;
    Time age{0};
  };
  std::map<std::string, Said> states;
  for (int rank = 0; rank < world_; ++rank) {
    const Peer& peer = peers_[rank];
    if (!peer.present) continue;
    std::string text = fmt::format("'{}'", peer.last.doing);
    if (!peer.last.waits_for.empty()) text += ", waiting for " + peer.last.waits_for;
    if (unresponsive(peer))
      text += fmt::format("; does not answer (pid {} on {})", peer.pid, peer.host);
    Said& said = states[text];
    said.ranks.push_back(rank);
    said.age = std::max(said.age, now_ - peer.progressed);
  }
  std::vector<std::pair<std::string, Said>> lines(states.begin(), states.end());
  std::ranges::stable_sort(lines, std::ranges::greater{},
                           [](const auto& line) { return line.second.age; });
  std::string text;
  for (const auto& [what, said] : lines) {
    text +=
        fmt::format("\n  {}: {:.1f} s ago, {}", name_ranks(said.ranks), seconds(said.age), what);
  }
  return text;
}

std::string HubControl::describe_pending() const {
  std::string text;
  for (const auto& [key, pending] : pending_) {
    std::vector<int> missing;
    for (size_t i = 0; i < pending.size(); ++i) {
      if (pending[i].empty()) missing.push_back(static_cast<int>(key.second[i]));
    }
    text += fmt::format("\n  the exchange '{}' waits for {}", key.first, name_ranks(missing));
  }
  return text;
}

}  // namespace sbtrain::control
