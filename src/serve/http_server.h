// An HTTP/1.1 server with limits on everything that a client controls: connections, the bytes of
// headers and bodies, and the time that each of them may take. One thread serves one connection.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sbtrain {

struct HttpRequest {
  std::string method;  // GET, HEAD or POST
  std::string path;    // decoded, without the query
  std::string body;
  // The body's share of HttpLimits::bodies_memory. Whoever has read the body drops both, and does
  // not keep them while the answer is made.
  std::shared_ptr<const void> body_memory;
  std::string authorization, origin, host;  // headers; empty if they are absent
  // Whether the client has closed its side of the connection; then nobody reads the answer.
  std::function<bool()> left;
  void drop_body() {
    body = std::string();
    body_memory.reset();
  }
};

struct HttpResponse {
  int status = 200;
  std::string type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
  // If set, the body is what this appends to `part`, part by part, until it returns false. It is
  // destroyed when the response has ended, also where the client has left before its end.
  std::function<bool(std::string& part)> stream;
};

struct HttpLimits {
  int64_t connections = 512;
  int64_t header_bytes = int64_t{64} << 10;
  int64_t body_bytes = int64_t{4} << 20;
  // What all bodies may take that are being read at one time, in bytes of memory. A byte of a body
  // counts as kMemoryOfBodyByte: of JSON's shortest value with memory of its own, "{}," in a list
  // that has just grown, the three bytes take 64 for the object and 3 x 16 for elements.
  static constexpr int64_t kMemoryOfBodyByte = 40;
  int64_t bodies_memory = int64_t{512} << 20;
  std::chrono::seconds read_time{30};  // of a whole request, from its first byte
  std::chrono::seconds idle_time{60};  // between two requests of a connection
  std::chrono::seconds write_time{
      30};  // of a part of a response, and a second more for each 16 KiB
};

class HttpServer {
 public:
  // Called on the threads of connections, several at once. `refusal` is asked with a request that
  // has no body yet: what it returns is the answer, and the body is not read. `refused` is what the
  // server says where it does not ask: for a request that is no HTTP, too large or too slow.
  struct Handlers {
    std::function<HttpResponse(HttpRequest)> answer;
    std::function<std::optional<HttpResponse>(const HttpRequest&)> refusal;
    std::function<HttpResponse(int status, const std::string& message)> refused;
  };

  // Listens on `host`, an address or a name; `port` 0 takes a free one. Throws ExitCode::kUsage if
  // that is not possible. Connections wait until start().
  HttpServer(const std::string& host, int port, const HttpLimits& limits, Handlers handlers);
  // close(0), if that has not happened.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const;
  bool is_local() const;  // only this machine reaches the address
  int64_t connections() const;
  int64_t refused_connections() const;  // so far, because of their number

  void start();
  // Accepts nothing from now on and lets answers that have begun end; what is left after `grace`
  // is cut off. Returns when all connections are closed.
  void close(std::chrono::milliseconds grace);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sbtrain
