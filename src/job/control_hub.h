// The end of the control channel at rank 0: it admits the other ranks, matches their exchanges,
// watches their signs of life, and tells all of them of the first failure.
#pragma once

#include <set>

#include "job/control_socket.h"
#include "job/launch.h"
#include "job/tcp_control.h"

namespace sbtrain::control {

class HubControl : public TcpControl {
 public:
  // Listens and waits until all ranks are there or the job has failed.
  HubControl(const Launch& launch, const Deadlines& deadlines);
  ~HubControl() override { stop_thread(); }

 protected:
  void turn() override;
  void close() override;

 private:
  // A connection that has not yet said who it is.
  struct Guest {
    Connection connection;
    Time since;
    Hello hello{};
    std::optional<Challenge> challenge{};  // once it has said hello
    bool leaving = false;                  // has been refused; what it is told is still on its way
  };
  struct Peer {
    std::unique_ptr<Connection> connection;  // null: absent, gone, or rank 0 itself
    bool present = false;
    bool left = false;  // has said its last; the connection stays open until this rank ends
    bool finished = false;
    std::string host;
    uint32_t pid = 0;
    Time heard{0};
    Time progressed{0};
    Time allowed_until{0};
    Beat last;
    bool talks() const { return connection && !left; }
  };
  // What the members of an exchange have sent, by their position; each is a queue, since a member
  // may start the next exchange of the topic before others have come to this one.
  using Pending = std::vector<std::deque<std::string>>;

  void wait_for_sockets();
  void admit();
  void read_guests();
  bool greet(Guest& guest, const Message& message);
  void refuse(Guest& guest, const Refusal& refusal);
  std::optional<Refusal> objection(const Hello& hello) const;
  void log_refusal(const Guest& guest, const std::string& reason);
  void welcome(Guest& guest);
  void remove_secret();
  void read_peers();
  void handle(int rank, Message message);
  void hear(int rank, Beat beat);
  void gather(int rank, Texts texts);
  void finish_rank(int rank);
  void watch_exchanges();
  void lose(int rank);
  void start_if_complete();
  void watch();
  void watch_rendezvous();
  std::vector<int> late_ranks();
  void send_beats();
  void flush();
  void fail_job(ExitCode code, const std::string& message);
  void send_to_all(const Message& message);

  bool silent(const Peer& peer, Time deadline) const { return now_ - peer.heard > deadline; }
  // Has missed so many signs of life that it probably does not run.
  bool unresponsive(const Peer& peer) const {
    return peer.present && silent(peer, deadlines_.progress / 4);
  }
  std::vector<int> select(const std::function<bool(const Peer&)>& condition) const;
  std::string name(int rank) const;  // "rank 3", with its host if that is not rank 0's
  std::string describe_state() const;
  std::string describe_pending() const;

  std::string secret_;
  std::filesystem::path secret_file_;  // until all ranks have read it
  FileDescriptor listener_;
  std::vector<Guest> guests_;
  std::set<std::string> refused_;  // who has been, so that those who try again are logged once
  std::vector<Peer> peers_;
  std::map<std::pair<std::string, std::vector<uint32_t>>, Pending> pending_;
  Time now_{0};  // of this turn
  Time next_beat_{0};
  Time next_notice_ = std::chrono::seconds(10);  // that ranks are missing, in the log
  Time last_allowed_{0};                         // when an allowance last excused all ranks
  bool started_ = false;
  bool failed_ = false;
};

}  // namespace sbtrain::control
