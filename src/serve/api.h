// The HTTP interface of a served model: OpenAI's completions, the tokenizer, the state of the
// server, and attention maps. docs/serving.md describes all of it for users.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "serve/engine.h"
#include "serve/http_server.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {

// What is served.
struct ServedModel {
  std::string name;
  const Tokenizer& tokenizer;
  bool starts_with_bos = false;  // prompts begin with bos, like the documents in training
  int64_t layers = 0, heads = 0;
  // One head's attention over `tokens`. Called on the engine's thread.
  std::function<AttentionMap(const std::vector<int32_t>& tokens, int64_t layer, int64_t head)> map;
};

struct ApiOptions {
  std::string token;  // that clients must send; empty: none
  std::string host;   // what the server was asked to listen on
  std::chrono::seconds time_limit{600};
  int64_t map_tokens = 512;  // of an attention map
};

class Api {
 public:
  Api(Engine& engine, ServedModel model, ApiOptions options);

  // From any thread.
  HttpResponse answer(HttpRequest request);
  // The refusal of a request for what stands in front of its body, which need not be read then.
  std::optional<HttpResponse> refusal(const HttpRequest& request);
  HttpResponse refused(int status, const std::string& message);
  // From now on, the server says that it is about to end.
  void drain() { draining_ = true; }
  // Adds what the server itself counts to the metrics.
  void set_server(const HttpServer* server) { server_ = server; }

 private:
  // Calls work(), whose errors become answers, and counts what it returns, if it returns an answer.
  template <typename Work>
  std::optional<HttpResponse> counted(const std::string& path, const Work& work);
  // A refusal of the method, or none. Throws ApiError for other ones.
  std::optional<HttpResponse> check_head(const HttpRequest& request) const;
  HttpResponse route(HttpRequest& request);
  void check_host(const HttpRequest& request) const;
  HttpResponse models() const;
  HttpResponse one_model(const std::string& name) const;
  HttpResponse health() const;
  static HttpResponse version_info();
  HttpResponse metrics() const;
  HttpResponse tokenize(HttpRequest& request) const;
  HttpResponse detokenize(HttpRequest& request) const;
  HttpResponse tokenizer_info() const;
  struct MapRequest {
    int64_t layer, head;
    std::vector<int32_t> tokens;
  };
  MapRequest read_map_request(const std::string& body) const;
  HttpResponse attention(HttpRequest& request);
  void count(const std::string& path, int status, double seconds);

  Engine& engine_;
  ServedModel model_;
  ApiOptions options_;
  int64_t created_;  // seconds since 1970
  std::atomic<bool> draining_ = false;
  std::atomic<const HttpServer*> server_ = nullptr;
  mutable std::mutex mutex_;
  struct Seconds {
    int64_t count = 0;
    double sum = 0;
  };
  std::map<std::pair<std::string, int>, Seconds> answers_;  // by path and status
};

}  // namespace sbtrain
