#include "serve/http_server.h"

#include <fcntl.h>
#include <httplib.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "core/error.h"
#include "serve/http_framing.h"

namespace sbtrain {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr int kBacklog = 1024;
constexpr size_t kLongestPath = 256;
constexpr size_t kRequestsOfAConnection = 1'000'000'000;  // there is no limit to tell
constexpr int64_t kSlowestBytesPerSecond = int64_t{16} << 10;
constexpr const char* kBodyTooLarge = "the body is larger than the server accepts";

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_;
};

int timeout_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

// Waits for events on `fd`. False after the deadline, or once `stop` is readable, if that is asked.
bool wait_for(int fd, short events, Clock::time_point deadline, int stop = -1) {
  while (true) {
    std::array<pollfd, 2> fds = {pollfd{fd, events, 0}, pollfd{stop, POLLIN, 0}};
    const int ready = ::poll(fds.data(), fds.size(), timeout_until(deadline));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0 || fds[1].revents != 0) return false;
    return true;
  }
}

// Headers that httplib would act upon, and that are to change nothing. It matches a range with a
// regular expression that takes megabytes of the stack for a few kilobytes, cuts a finished answer
// by it or refuses it, and compresses what is not worth the time.
constexpr std::array kHiddenHeaders = {"Range", "Accept-Encoding"};

// One connection, as httplib reads and writes it. Counts and times what the client sends.
class Connection : public httplib::Stream {
 public:
  Connection(int fd, const HttpLimits& limits) : fd_(fd), limits_(limits) {}

  // Waits for the first byte of a request. False if none comes, or once `stop` is readable.
  bool wait_for_request(int stop) {
    if (begin_ < end_) return true;
    return wait_for(fd_, POLLIN, Clock::now() + limits_.idle_time, stop) && fill();
  }
  void begin_request() {
    deadline_ = Clock::now() + limits_.read_time;
    in_headers_ = true;
    line_bytes_ = 0;
    line_begin_ = 0;
    renamed_ = false;
    head_.clear();
    allowed_ = limits_.header_bytes;
    must_close = false;
  }
  // The first line and the headers of the request, as far as they have been read.
  const std::string& head() const { return head_; }
  bool left() const {
    pollfd fd{fd_, POLLRDHUP, 0};
    return ::poll(&fd, 1, 0) > 0 && (fd.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
  }
  // Ends the connection in such a way that the client can still read the answer, though it has sent
  // more than was read.
  void close_gently() {
    ::shutdown(fd_, SHUT_WR);
    const Clock::time_point deadline = Clock::now() + std::chrono::seconds(2);
    int64_t most = int64_t{1} << 20;
    while (most > 0 && wait_for(fd_, POLLIN, deadline)) {
      const ssize_t n = ::recv(fd_, buffer_.data(), buffer_.size(), 0);
      if (n <= 0) return;
      most -= n;
    }
  }

  bool is_readable() const override { return begin_ < end_ || wait_for(fd_, POLLIN, deadline_); }
  bool is_writable() const override {
    return wait_for(fd_, POLLOUT, Clock::now() + limits_.write_time);
  }
  ssize_t read(char* to, size_t size) override {
    if (begin_ == end_ && !(wait_for(fd_, POLLIN, deadline_) && fill())) return -1;
    if (in_headers_ && size > 0 && ends_hidden_name() && !std::exchange(renamed_, true)) {
      *to = '-';  // nobody knows a header "Range-"
      return 1;
    }
    const size_t count = std::min(size, in_headers_ ? 1 : end_ - begin_);
    for (size_t i = 0; i < count; ++i) {
      if (!allow(buffer_[begin_ + i])) {
        must_close = true;
        return -1;
      }
    }
    std::copy_n(buffer_.data() + begin_, count, to);
    begin_ += count;
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const char* from, size_t size) override {
    const Clock::time_point deadline =
        Clock::now() + limits_.write_time +
        std::chrono::seconds(static_cast<int64_t>(size) / kSlowestBytesPerSecond);
    for (size_t sent = 0; sent < size;) {
      const ssize_t n = ::send(fd_, from + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) {
        sent += static_cast<size_t>(n);
        continue;
      }
      const bool full = n < 0 && (errno == EAGAIN || errno == EINTR);
      if (!full || !wait_for(fd_, POLLOUT, deadline)) return -1;
    }
    return static_cast<ssize_t>(size);
  }
  void get_remote_ip_and_port(std::string& ip, int& port) const override {
    ip.clear();
    port = 0;
  }
  void get_local_ip_and_port(std::string& ip, int& port) const {  // NOLINT: not in every version
    ip.clear();
    port = 0;
  }
  socket_t socket() const override { return fd_; }

  bool must_close = false;  // the rest of the request was not read

 private:
  bool fill() {
    ssize_t n = 0;
    do {
      n = ::recv(fd_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    begin_ = 0;
    end_ = n > 0 ? static_cast<size_t>(n) : 0;
    return n > 0;
  }
  // Whether the next byte is the colon after the name of a header that httplib is not to see.
  bool ends_hidden_name() const {
    if (buffer_[begin_] != ':') return false;
    const char* name = head_.c_str() + line_begin_;
    return std::ranges::any_of(kHiddenHeaders,
                               [&](const char* hidden) { return ::strcasecmp(name, hidden) == 0; });
  }
  // Counts a byte of the request: first of its headers, which end with an empty line, then of its
  // body, whose framing may add as much again.
  bool allow(char c) {
    if (--allowed_ < 0) return false;
    if (!in_headers_) return true;
    head_ += c;
    if (c == '\n') {
      if (line_bytes_ == 0) {
        in_headers_ = false;
        allowed_ = 2 * limits_.body_bytes + limits_.header_bytes;
      }
      line_bytes_ = 0;
      line_begin_ = head_.size();
      renamed_ = false;
    } else if (c != '\r') {
      ++line_bytes_;
    }
    return true;
  }

  int fd_;
  const HttpLimits& limits_;
  Clock::time_point deadline_;
  bool in_headers_ = true;
  int64_t line_bytes_ = 0;  // of a header's line, without its end
  size_t line_begin_ = 0;   // of that line in head_
  bool renamed_ = false;    // what the line has before its colon
  std::string head_;
  int64_t allowed_ = 0;  // bytes that may still come
  std::array<char, 16384> buffer_;
  size_t begin_ = 0, end_ = 0;  // what of the buffer is not read yet
};

// The connection that the calling thread serves.
thread_local Connection* current = nullptr;  // NOLINT: httplib's handlers do not see it

// The memory that the bodies of all connections may take together.
class BodyMemory {
 public:
  explicit BodyMemory(int64_t bytes) : left_(bytes) {}

  // What one body has taken; it is given back in the end.
  class Share {
   public:
    explicit Share(BodyMemory& memory) : memory_(memory) {}
    ~Share() { memory_.left_ += taken_; }
    Share(const Share&) = delete;
    Share& operator=(const Share&) = delete;
    // Takes the memory of `bytes` more bytes of the body. Returns false where others have it.
    bool take(int64_t bytes) {
      const int64_t memory = bytes * HttpLimits::kMemoryOfBodyByte;
      int64_t left = memory_.left_;
      do {
        if (left < memory) return false;
      } while (!memory_.left_.compare_exchange_weak(left, left - memory));
      taken_ += memory;
      return true;
    }

   private:
    BodyMemory& memory_;
    int64_t taken_ = 0;
  };

 private:
  std::atomic<int64_t> left_;
};

// What httplib parses and writes; sockets, threads and time are ours.
class Protocol : public httplib::Server {
 public:
  Protocol(const HttpLimits& limits, const HttpServer::Handlers& handlers)
      : limits_(limits), handlers_(handlers), memory_(limits.bodies_memory) {
    svr_sock_ = 0;  // without one, httplib thinks that it is shutting down and cuts streams off
    // What the header Keep-Alive promises.
    set_keep_alive_timeout(limits.idle_time.count());
    set_keep_alive_max_count(kRequestsOfAConnection);
    set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      return before_body(request, response);
    });
    // A client that asks before it sends its body gets the answer that it would get without it.
    // httplib writes it without its length, so its end is that of the connection.
    set_expect_100_continue_handler(
        [this](const httplib::Request& request, httplib::Response& response) {
          if (before_body(request, response) == Verdict::Unhandled) return kContinue;
          close_after(response);
          return response.status;
        });
    Post("/.*", [this](const httplib::Request& request, httplib::Response& response,
                       const httplib::ContentReader& reader) {
      HttpRequest mine = head_of(request);
      if (read_body(reader, mine, response)) answer(request, std::move(mine), response);
    });
    set_error_handler([this](const httplib::Request&, httplib::Response& response) {
      if (!response.body.empty()) return;
      refuse(response, response.status, "");
    });
    set_exception_handler(
        [this](const httplib::Request&, httplib::Response& response, const std::exception_ptr&) {
          refuse(response, 500, "the server has failed at this request");
        });
  }

  // Serves one request. Returns whether the connection can be used for another.
  bool serve(Connection& connection, bool last) {
    connection.begin_request();
    current = &connection;
    bool closed = false;
    const bool ok = process_request(connection, last, closed, nullptr);
    current = nullptr;
    return ok && !closed && !connection.must_close;
  }

 private:
  using Verdict = httplib::Server::HandlerResponse;
  static constexpr int kContinue = 100;

  // Answers what has no body, and what is refused for its headers.
  Verdict before_body(const httplib::Request& request, httplib::Response& response) {
    const auto refused = [&](int status, const char* message) {
      refuse(response, status, message);
      return Verdict::Handled;
    };
    if (const auto problem = framing_problem(current->head())) {
      return refused(problem->status, problem->message);
    }
    if (request.path.size() > kLongestPath || request.path.find('\n') != std::string::npos ||
        request.path.find('\r') != std::string::npos) {
      return refused(404, "there is no such path");
    }
    if (request.method == "GET" || request.method == "HEAD") {
      if (request.has_header("Transfer-Encoding") ||
          (request.has_header("Content-Length") &&
           request.get_header_value("Content-Length") != "0")) {
        return refused(400, "a request of this method has no body");
      }
      answer(request, head_of(request), response);
      return Verdict::Handled;
    }
    if (request.method != "POST") return refused(405, "the methods are GET, HEAD and POST");
    if (request.is_multipart_form_data()) return refused(415, "the body must be JSON");
    // Strangers cannot make the server read what they send.
    if (auto refusal = handlers_.refusal(head_of(request))) {
      refuse(response, std::move(*refusal));
      return Verdict::Handled;
    }
    if (request.has_header("Transfer-Encoding")) {
      // httplib reads the sizes of chunks loosely, so nothing may follow such a body.
      current->must_close = true;
      return Verdict::Unhandled;
    }
    // httplib would wait for a body that no header announces, and for one that is too large.
    if (!request.has_header("Content-Length")) {
      answer(request, head_of(request), response);
      return Verdict::Handled;
    }
    const std::string length = request.get_header_value("Content-Length");
    int64_t bytes = 0;
    const auto [end, error] = std::from_chars(length.data(), length.data() + length.size(), bytes);
    if (error == std::errc::invalid_argument || end != length.data() + length.size() ||
        length.starts_with('-')) {
      return refused(400, "the header Content-Length is no number of bytes");
    }
    if (error == std::errc::result_out_of_range || bytes > limits_.body_bytes) {
      return refused(413, kBodyTooLarge);
    }
    return Verdict::Unhandled;
  }

  bool read_body(const httplib::ContentReader& reader, HttpRequest& to,
                 httplib::Response& response) {
    bool too_large = false;
    bool no_room = false;
    const auto share = std::make_shared<BodyMemory::Share>(memory_);
    to.body_memory = share;
    const bool whole = reader([&](const char* data, size_t size) {
      too_large = static_cast<int64_t>(to.body.size() + size) > limits_.body_bytes;
      no_room = !too_large && !share->take(static_cast<int64_t>(size));
      if (too_large || no_room) return false;
      to.body.append(data, size);
      return true;
    });
    if (whole) return true;
    if (too_large) {
      refuse(response, 413, kBodyTooLarge);
    } else if (no_room) {
      refuse(response, 503, "the server reads too many bodies at once; try again later");
    } else {
      refuse(response, 400, "the body has not arrived, or not in time");
    }
    return false;
  }

  // The request without its body.
  static HttpRequest head_of(const httplib::Request& request) {
    Connection& connection = *current;
    return {.method = request.method,
            .path = request.path,
            .body = {},
            .body_memory = {},
            .authorization = request.get_header_value("Authorization"),
            .origin = request.get_header_value("Origin"),
            .host = request.get_header_value("Host"),
            .left = [&connection] { return connection.left(); }};
  }

  void answer(const httplib::Request& request, HttpRequest mine, httplib::Response& response) {
    write(handlers_.answer(std::move(mine)), request.version == "HTTP/1.0", response);
    if (current->must_close) close_after(response);
  }

  void refuse(httplib::Response& response, int status, const std::string& message) {
    refuse(response, handlers_.refused(status, message));
  }
  void refuse(httplib::Response& response, HttpResponse refusal) {
    write(std::move(refusal), false, response);
    close_after(response);
  }
  static void close_after(httplib::Response& response) {
    if (current != nullptr) current->must_close = true;
    if (!response.has_header("Connection")) response.set_header("Connection", "close");
  }

  static void write(HttpResponse from, bool old_version, httplib::Response& to) {
    to.status = from.status;
    for (const auto& [name, value] : from.headers) to.set_header(name, value);
    if (!from.stream) {
      to.set_content(from.body, from.type);
      return;
    }
    const auto provide = [stream = std::move(from.stream)](size_t, httplib::DataSink& sink) {
      std::string part;
      const bool more = stream(part);
      if (!part.empty() && !sink.write(part.data(), part.size())) return false;
      if (!more) sink.done();
      return true;
    };
    if (old_version) {
      current->must_close = true;  // the end of the connection is the end of the body
      to.set_content_provider(from.type, provide);
    } else {
      to.set_chunked_content_provider(from.type, provide);
    }
  }

  const HttpLimits& limits_;
  const HttpServer::Handlers& handlers_;
  BodyMemory memory_;
};

// A listening socket on the first address of `host` that takes one.
void listen_on(Descriptor& listener, const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) {
    fail(ExitCode::kUsage, "--host {}: {}", host, ::gai_strerror(error));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, ::freeaddrinfo);
  int last_error = 0;
  for (const addrinfo* a = found; a != nullptr; a = a->ai_next) {
    listener.reset(::socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int on = 1;
    ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (listener.get() >= 0 && ::bind(listener.get(), a->ai_addr, a->ai_addrlen) == 0 &&
        ::listen(listener.get(), kBacklog) == 0) {
      return;
    }
    last_error = errno;
  }
  fail(ExitCode::kUsage, "cannot listen on {} port {}: {}; choose another with {}", host, port,
       std::generic_category().message(last_error),
       last_error == EADDRNOTAVAIL ? "--host" : "--port");
}

}  // namespace

class HttpServer::Impl {
 public:
  Impl(const std::string& host, int port, const HttpLimits& limits, Handlers handlers)
      : limits_(limits),
        handlers_(std::move(handlers)),
        protocol_(limits_, handlers_),
        stop_(::eventfd(0, EFD_CLOEXEC)) {
    if (stop_.get() < 0) fail(ExitCode::kOutOfMemory, "no descriptor is left for the server");
    listen_on(listener_, host, port);
  }
  ~Impl() { close(milliseconds(0)); }

  int port() const {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size);  // NOLINT
    std::array<char, 8> service{};
    ::getnameinfo(reinterpret_cast<sockaddr*>(&address), size, nullptr, 0,  // NOLINT
                  service.data(), service.size(), NI_NUMERICSERV);
    return std::atoi(service.data());
  }
  int64_t connections() const {
    const std::lock_guard lock(mutex_);
    return static_cast<int64_t>(open_.size());
  }
  bool is_local() const {
    sockaddr_storage address{};
    socklen_t size = sizeof(address);
    ::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size);  // NOLINT
    if (address.ss_family == AF_INET) {
      const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);  // NOLINT
      return ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
    }
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);  // NOLINT
    return address.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
  }
  int64_t refused() const { return refused_; }

  void start() {
    acceptor_ = std::thread([this] { accept_all(); });
  }

  void close(milliseconds grace) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof(one));
    if (acceptor_.joinable()) acceptor_.join();
    std::unique_lock lock(mutex_);
    const auto none = [this] { return open_.empty(); };
    if (!closed_.wait_for(lock, grace, none)) {
      for (const int fd : open_) ::shutdown(fd, SHUT_RDWR);
      closed_.wait(lock, none);
    }
  }

 private:
  void accept_all() {
    while (wait_for(listener_.get(), POLLIN, Clock::now() + std::chrono::hours(1), stop_.get()) ||
           !stopping()) {
      const int fd = ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (fd >= 0) {
        admit(fd);
      } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        std::this_thread::sleep_for(milliseconds(10));  // until others have closed theirs
      }
    }
  }

  bool stopping() const {
    pollfd fd{stop_.get(), POLLIN, 0};
    return ::poll(&fd, 1, 0) > 0;
  }

  void admit(int fd) {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    {
      const std::lock_guard lock(mutex_);
      if (static_cast<int64_t>(open_.size()) < limits_.connections) {
        open_.insert(fd);
      } else {
        ++refused_;
      }
      if (!open_.contains(fd)) {
        turn_away(fd);
        return;
      }
    }
    try {
      std::thread([this, fd] { serve(fd); }).detach();
    } catch (const std::system_error&) {  // no thread is left
      turn_away(fd, /*registered=*/true);
    }
  }

  // Answers without reading the request, and without waiting.
  void turn_away(int fd, bool registered = false) {
    const HttpResponse response = handlers_.refused(503, "too many connections; try again later");
    const std::string text = fmt::format(
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: {}\r\nContent-Length: {}\r\n"
        "Retry-After: 1\r\nConnection: close\r\n\r\n{}",
        response.type, response.body.size(), response.body);
    ::send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    ::shutdown(fd, SHUT_WR);
    if (registered) return forget(fd);
    ::close(fd);
  }

  void serve(int fd) {
    try {
      const auto connection = std::make_unique<Connection>(fd, limits_);
      bool open = true;
      while (open && connection->wait_for_request(stop_.get())) {
        open = protocol_.serve(*connection, stopping());
      }
      if (connection->must_close) connection->close_gently();
    } catch (...) {  // NOLINT: no memory for the connection: it is closed
    }
    forget(fd);
  }

  void forget(int fd) {
    const std::lock_guard lock(mutex_);
    open_.erase(fd);
    ::close(fd);
    closed_.notify_all();
  }

  const HttpLimits limits_;
  const Handlers handlers_;
  Protocol protocol_;
  Descriptor listener_, stop_;
  std::thread acceptor_;
  std::atomic<int64_t> refused_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable closed_;
  std::set<int> open_;  // descriptors of connections
};

HttpServer::HttpServer(const std::string& host, int port, const HttpLimits& limits,
                       Handlers handlers)
    : impl_(std::make_unique<Impl>(host, port, limits, std::move(handlers))) {}
HttpServer::~HttpServer() = default;
int HttpServer::port() const {
  return impl_->port();
}
bool HttpServer::is_local() const {
  return impl_->is_local();
}
int64_t HttpServer::connections() const {
  return impl_->connections();
}
int64_t HttpServer::refused_connections() const {
  return impl_->refused();
}
void HttpServer::start() {
  impl_->start();
}
void HttpServer::close(std::chrono::milliseconds grace) {
  impl_->close(grace);
}

}  // namespace sbtrain
