// The sockets of job/control.h: listening, connecting, and connections that carry messages.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "core/file_descriptor.h"
#include "job/control_message.h"

namespace sbtrain::control {

// A socket that listens on `port` (0: any free one) of `address`, or of every address of the
// machine if it is empty. Throws ExitCode::kCommunication.
FileDescriptor listen_on(const std::string& address, int port);
int port_of(int listener);

// The next waiting connection of a listener, non-blocking; -1 if there is none.
FileDescriptor accept_from(int listener);
// "10.0.0.7:41234", or "an unknown address".
std::string peer_name(int socket);

// Tries every address of a host once, each for at most `patience`. Returns a non-blocking socket,
// or -1 and the `problem`.
FileDescriptor connect_to(const std::string& address, int port, std::chrono::milliseconds patience,
                          std::string& problem);

// Messages over a non-blocking socket. It never waits: what the other side does not take yet is
// kept, and what has arrived in part stays for the next call.
class Connection {
 public:
  Connection(FileDescriptor socket, size_t largest_frame)
      : socket_(std::move(socket)), largest_frame_(largest_frame) {}

  int fd() const { return socket_.get(); }
  void set_largest_frame(size_t bytes) { largest_frame_ = bytes; }
  bool has_output() const { return sent_ < output_.size(); }

  void send(const Message& message) { output_ += encode(message); }
  // Writes what the other side takes. False: the connection is lost.
  bool flush();
  // Appends the messages that have arrived. False: the connection has ended, or carries what is no
  // message or too large a one; messages before that are still appended.
  bool receive(std::vector<Message>& messages);
  // Says that nothing more will be sent; the other side can still read what was.
  void end_output();

 private:
  bool take_frames(std::vector<Message>& messages);
  FileDescriptor socket_;
  size_t largest_frame_;
  std::string input_;
  std::string output_;
  size_t sent_ = 0;  // bytes of output_ that are gone
};

}  // namespace sbtrain::control
