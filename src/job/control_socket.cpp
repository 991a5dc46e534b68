#include "job/control_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <memory>
#include <system_error>

#include "core/error.h"

namespace sbtrain::control {
namespace {

std::string reason(int error) {
  return std::generic_category().message(error);
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// The addresses of a host name; of the whole machine if it is empty.
Addresses resolve(const std::string& host, int port, std::string& problem) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (host.empty() ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(),
                                &hints, &found);
  if (error != 0) problem = fmt::format("cannot resolve '{}': {}", host, gai_strerror(error));
  return {error == 0 ? found : nullptr, &freeaddrinfo};
}

void set_option(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof(value));
}

FileDescriptor listen_at(const addrinfo& address, std::string& problem) {
  FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (socket.get() >= 0) {
    set_option(socket.get(), SOL_SOCKET, SO_REUSEADDR, 1);
    // The IPv6 socket of the whole machine takes IPv4 connections as well.
    if (address.ai_family == AF_INET6) set_option(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
    if (::bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0 &&
        ::listen(socket.get(), SOMAXCONN) == 0) {
      return socket;
    }
  }
  problem = reason(errno);
  return FileDescriptor();
}

FileDescriptor connect_at(const addrinfo& address, std::chrono::milliseconds patience,
                          std::string& problem) {
  FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (socket.get() < 0 ||
      (::connect(socket.get(), address.ai_addr, address.ai_addrlen) != 0 && errno != EINPROGRESS)) {
    problem = reason(errno);
    return FileDescriptor();
  }
  pollfd ready{socket.get(), POLLOUT, 0};
  int error = ETIMEDOUT;
  if (::poll(&ready, 1, static_cast<int>(patience.count())) == 1) {
    socklen_t size = sizeof(error);
    getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  }
  if (error != 0) {
    problem = reason(error);
    return FileDescriptor();
  }
  set_option(socket.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  return socket;
}

}  // namespace

FileDescriptor listen_on(const std::string& address, int port) {
  std::string problem = "it has no address";
  const Addresses addresses = resolve(address, port, problem);
  // IPv6 first, since that socket serves both where the machine has both.
  for (const int family : {AF_INET6, AF_INET}) {
    for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
      if (a->ai_family != family) continue;
      FileDescriptor socket = listen_at(*a, problem);
      if (socket.get() >= 0) return socket;
    }
  }
  fail(ExitCode::kCommunication,
       "rank 0 cannot listen on port {} of {}: {}; if another program uses the port, set "
       "MASTER_PORT to a free one in all ranks",
       port, address.empty() ? "this machine" : address, problem);
}

int port_of(int listener) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  return ntohs(address.ss_family == AF_INET6
                   ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                   : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

FileDescriptor accept_from(int listener) {
  FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.get() >= 0) set_option(socket.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  return socket;
}

std::string peer_name(int socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  std::array<char, NI_MAXHOST> host{};
  std::array<char, NI_MAXSERV> port{};
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host.data(), host.size(),
                  port.data(), port.size(), NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "an unknown address";
  }
  return fmt::format("{}:{}", host.data(), port.data());
}

FileDescriptor connect_to(const std::string& address, int port, std::chrono::milliseconds patience,
                          std::string& problem) {
  const Addresses addresses = resolve(address, port, problem);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    FileDescriptor socket = connect_at(*a, patience, problem);
    if (socket.get() >= 0) return socket;
  }
  return FileDescriptor();
}

bool Connection::flush() {
  while (has_output()) {
    const ssize_t n =
        ::send(fd(), output_.data() + sent_, output_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    sent_ += static_cast<size_t>(n);
  }
  output_.clear();
  sent_ = 0;
  return true;
}

bool Connection::receive(std::vector<Message>& messages) {
  std::array<char, 1 << 16> part;
  constexpr int kParts = 64;  // then the others have their turn; the rest waits in the socket
  for (int i = 0; i < kParts; ++i) {
    const ssize_t n = ::recv(fd(), part.data(), part.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK;
    if (n == 0) return false;
    input_.append(part.data(), static_cast<size_t>(n));
    if (!take_frames(messages)) return false;
  }
  return true;
}

bool Connection::take_frames(std::vector<Message>& messages) {
  size_t at = 0;
  bool good = true;
  while (good && input_.size() - at >= sizeof(uint32_t)) {
    size_t length = 0;
    for (size_t i = sizeof(uint32_t); i-- > 0;) {
      length = length << 8 | static_cast<uint8_t>(input_[at + i]);
    }
    good = length <= largest_frame_;
    if (!good || input_.size() - at - sizeof(uint32_t) < length) break;
    try {
      messages.push_back(decode(std::string_view(input_).substr(at + sizeof(uint32_t), length)));
      at += sizeof(uint32_t) + length;
    } catch (const Error&) {
      good = false;
    }
  }
  input_.erase(0, at);
  return good;
}

void Connection::end_output() {
  ::shutdown(fd(), SHUT_WR);
}

}  // namespace sbtrain::control
