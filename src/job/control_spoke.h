// The end of the control channel at every rank but rank 0.
#pragma once

#include "job/control_socket.h"
#include "job/launch.h"
#include "job/tcp_control.h"

namespace sbtrain::control {

class SpokeControl : public TcpControl {
 public:
  // Connects to rank 0 and waits until all ranks are there or the job has failed.
  SpokeControl(const Launch& launch, const Deadlines& deadlines);
  ~SpokeControl() override { stop_thread(); }

 protected:
  void turn() override;
  void close() override;

 private:
  bool join();
  enum class Answer : uint8_t { kNext, kRefused, kAccepted };
  bool find_secret(std::string& problem);
  Answer answer(const Message& message, std::string& problem);
  bool greet(std::chrono::steady_clock::time_point deadline, std::string& problem);
  void handle(Message message);
  void lose(const std::string& why);
  void await_end();

  const Launch launch_;
  const std::string root_;  // "node7:23456", for messages
  std::unique_ptr<Connection> connection_;
  // Of the present try to join:
  std::string secret_;
  Hello hello_;
  std::optional<Challenge> challenge_;
  bool told_to_stop_ = false;  // and has told rank 0, which ends the job
  bool failed_ = false;        // the job; rank 0 has said so, and only its end is awaited
  Time heard_{0};
  Time next_beat_{0};
};

}  // namespace sbtrain::control
