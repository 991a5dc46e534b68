#include "serve/api.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "core/error.h"
#include "core/version.h"
#include "serve/api_request.h"
#include "serve/completions.h"
#include "serve/page.h"

namespace sbtrain {
namespace {

// Takes as long whatever the two have in common, so that a token cannot be guessed byte by byte.
bool same_secret(std::string_view given, std::string_view secret) {
  unsigned difference = given.size() == secret.size() ? 0 : 1;
  for (size_t i = 0; i < secret.size(); ++i) {
    const char c = given.empty() ? '\0' : given[i % given.size()];
    difference |= static_cast<unsigned char>(c) ^ static_cast<unsigned char>(secret[i]);
  }
  return difference == 0;
}

// Refuses what pages of other sites make a browser send: only the server's own page may use it.
void check_origin(const HttpRequest& request) {
  if (request.origin.empty()) return;
  const size_t scheme = request.origin.find("://");
  if (scheme != std::string::npos && request.origin.substr(scheme + 3) == request.host) return;
  throw ApiError{403, "requests from pages of other sites are refused", ""};
}

// "name" of "name:8000"; the colons of an address in brackets are its own.
std::string_view without_port(std::string_view host) {
  const size_t colon = host.rfind(':');
  const size_t bracket = host.rfind(']');
  const bool has_port =
      colon != std::string_view::npos && (bracket == std::string_view::npos || bracket < colon);
  return has_port ? host.substr(0, colon) : host;
}

bool same_name(std::string_view a, std::string_view b) {
  return std::ranges::equal(
      a, b, [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

std::string metric(const char* name, const char* type, const char* help, double value) {
  return fmt::format("# HELP sbtrain_{0} {1}\n# TYPE sbtrain_{0} {2}\nsbtrain_{0} {3}\n", name,
                     help, type, value);
}

const std::map<std::string, std::string, std::less<>>& methods() {
  static const std::map<std::string, std::string, std::less<>> methods = {
      {"/", "GET"},          {"/health", "GET"},         {"/metrics", "GET"},
      {"/v1/models", "GET"}, {"/tokenizer_info", "GET"}, {"/v1/completions", "POST"},
      {"/tokenize", "POST"}, {"/detokenize", "POST"},    {"/attention", "POST"},
      {"/version", "GET"}};
  return methods;
}

constexpr std::string_view kOneModel = "/v1/models/";

// The path in methods() that answers what is asked at `path`.
std::string known_path(const std::string& path) {
  return path.starts_with(kOneModel) ? "/v1/models" : path;
}

Json or_null(const std::string& text) {
  return text.empty() ? Json() : Json(text);
}

Json model_json(const ServedModel& model, int64_t created, int64_t capacity) {
  return {{"id", model.name},      {"object", "model"},         {"created", created},
          {"owned_by", "sbtrain"}, {"max_model_len", capacity}, {"layers", model.layers},
          {"heads", model.heads}};
}

}  // namespace

Api::Api(Engine& engine, ServedModel model, ApiOptions options)
    : engine_(engine),
      model_(std::move(model)),
      options_(std::move(options)),
      created_(std::chrono::duration_cast<std::chrono::seconds>(
                   std::chrono::system_clock::now().time_since_epoch())
                   .count()) {}

HttpResponse Api::refused(int status, const std::string& message) {
  count("other", status, 0);
  return error_response({status, message.empty() ? "the request is no valid HTTP" : message, ""});
}

template <typename Work>
std::optional<HttpResponse> Api::counted(const std::string& path, const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  std::optional<HttpResponse> response;
  try {
    response = work();
  } catch (const ApiError& error) {
    response = error_response(error);
  } catch (const std::bad_alloc&) {
    response = error_response({503, "the server has too little memory for this request", ""});
  } catch (const std::exception& error) {
    response = error_response({500, error.what(), ""});
  }
  if (!response) return std::nullopt;
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string known = known_path(path);
  count(methods().contains(known) ? known : "other", response->status, seconds);
  return response;
}

HttpResponse Api::answer(HttpRequest request) {
  const std::string path = request.path;
  return *counted(path, [&] { return std::optional(route(request)); });
}

std::optional<HttpResponse> Api::refusal(const HttpRequest& request) {
  return counted(request.path, [&] { return check_head(request); });
}

void Api::count(const std::string& path, int status, double seconds) {
  const std::lock_guard lock(mutex_);
  Seconds& of_answer = answers_[{path, status}];
  ++of_answer.count;
  of_answer.sum += seconds;
}

// A page of another site can have its own name stand for 127.0.0.1 once it is loaded. For the
// browser this server is then that site, so that the origin shows nothing; the name still does.
// Where others can reach the server anyway, or need a token, names are not looked at: it may have
// any, and such a page would win nothing.
void Api::check_host(const HttpRequest& request) const {
  const HttpServer* server = server_;
  if (server == nullptr || !server->is_local() || !options_.token.empty()) return;
  const std::string_view name = without_port(request.host);
  for (const std::string& known :
       {std::string("127.0.0.1"), std::string("localhost"), std::string("[::1]"), options_.host,
        fmt::format("[{}]", options_.host)}) {
    if (same_name(name, known)) return;
  }
  throw ApiError{403,
                 fmt::format("a server without a token answers to localhost or {} alone, which the "
                             "header Host must name",
                             options_.host),
                 ""};
}

std::optional<HttpResponse> Api::check_head(const HttpRequest& request) const {
  const auto found = methods().find(known_path(request.path));
  if (found == methods().end()) throw ApiError{404, "there is no such path", ""};
  const std::string method = request.method == "HEAD" ? "GET" : request.method;
  if (method != found->second) {
    HttpResponse response =
        error_response({405, fmt::format("{} takes {}", request.path, found->second), ""});
    response.headers.emplace_back("Allow", found->second == "GET" ? "GET, HEAD" : found->second);
    return response;
  }
  check_host(request);
  check_origin(request);
  if (request.path == "/" || request.path == "/health") return std::nullopt;
  constexpr std::string_view kBearer = "Bearer ";  // in any case: RFC 9110, 11.1
  const std::string_view given = request.authorization;
  if (!options_.token.empty() && !(same_name(given.substr(0, kBearer.size()), kBearer) &&
                                   same_secret(given.substr(kBearer.size()), options_.token))) {
    throw ApiError{401, "the request needs the server's token: Authorization: Bearer TOKEN", ""};
  }
  return std::nullopt;
}

HttpResponse Api::route(HttpRequest& request) {
  if (auto refusal = check_head(request)) return std::move(*refusal);
  if (request.path == "/") return page();
  if (request.path == "/health") return health();
  if (request.path == "/metrics") return metrics();
  if (request.path == "/version") return version_info();
  if (request.path == "/v1/models") return models();
  if (request.path.starts_with(kOneModel)) return one_model(request.path.substr(kOneModel.size()));
  if (request.path == "/tokenizer_info") return tokenizer_info();
  if (request.path == "/tokenize") return tokenize(request);
  if (request.path == "/detokenize") return detokenize(request);
  if (request.path == "/attention") return attention(request);
  return answer_completion({.engine = engine_,
                            .tokenizer = model_.tokenizer,
                            .starts_with_bos = model_.starts_with_bos,
                            .model_name = model_.name,
                            .time_limit = options_.time_limit},
                           request);
}

HttpResponse Api::health() const {
  if (draining_) throw ApiError{503, "the server is ending", ""};
  return json_response({{"status", "ok"}});
}

HttpResponse Api::version_info() {
  return json_response({{"version", version()}, {"revision", git_revision()}});
}

HttpResponse Api::models() const {
  return json_response({{"object", "list"},
                        {"data", Json::array({model_json(model_, created_, engine_.capacity())})}});
}

HttpResponse Api::one_model(const std::string& name) const {
  if (name != model_.name) {
    throw ApiError{404,
                   fmt::format("there is no model '{}'; the server has '{}'", name, model_.name),
                   "model"};
  }
  return json_response(model_json(model_, created_, engine_.capacity()));
}

HttpResponse Api::tokenizer_info() const {
  const Tokenizer& tokenizer = model_.tokenizer;
  return json_response({{"bos_token", or_null(special_name(tokenizer, tokenizer.bos()))},
                        {"eos_token", or_null(special_name(tokenizer, tokenizer.eos()))},
                        {"unk_token", or_null(special_name(tokenizer, tokenizer.unk()))},
                        {"vocab_size", tokenizer.size()},
                        {"model_max_length", engine_.capacity()},
                        {"add_bos_token", model_.starts_with_bos}});
}

HttpResponse Api::tokenize(HttpRequest& request) const {
  const RequestFields fields(request.body);
  if (!fields.has("prompt")) throw ApiError{400, "'prompt' is missing", "prompt"};
  const std::string prompt = fields.text("prompt", "");
  const Tokenizer& tokenizer = model_.tokenizer;
  std::vector<int32_t> tokens;
  // Clients ask for the id of a special token by its name alone.
  for (const int32_t special : {tokenizer.bos(), tokenizer.eos()}) {
    if (tokens.empty() && special >= 0 && prompt == special_name(tokenizer, special)) {
      tokens.push_back(special);
    }
  }
  if (tokens.empty()) {
    if (fields.boolean("add_special_tokens", true) && model_.starts_with_bos &&
        tokenizer.bos() >= 0) {
      tokens.push_back(tokenizer.bos());
    }
    tokenizer.encode(prompt, tokens);
  }
  return json_response(
      {{"tokens", tokens}, {"count", tokens.size()}, {"max_model_len", engine_.capacity()}});
}

HttpResponse Api::detokenize(HttpRequest& request) const {
  const RequestFields fields(request.body);
  if (!fields.has("tokens")) throw ApiError{400, "'tokens' is missing", "tokens"};
  const auto tokens = token_ids(fields.value("tokens"), model_.tokenizer, "tokens");
  return json_response({{"prompt", model_.tokenizer.decode(tokens)}});
}

Api::MapRequest Api::read_map_request(const std::string& body) const {
  const RequestFields fields(body);
  MapRequest request = {.layer = fields.integer("layer", 0, 0, model_.layers - 1),
                        .head = fields.integer("head", 0, 0, model_.heads - 1),
                        .tokens = {}};
  if (fields.has("tokens")) {
    request.tokens = token_ids(fields.value("tokens"), model_.tokenizer, "tokens");
  } else {
    request.tokens =
        prompt_tokens(model_.tokenizer, model_.starts_with_bos, fields.text("prompt", ""));
  }
  const int64_t most = std::min(options_.map_tokens, engine_.capacity());
  if (request.tokens.empty() || static_cast<int64_t>(request.tokens.size()) > most) {
    throw ApiError{400,
                   fmt::format("a map is of 1 to {} tokens, not {}", most, request.tokens.size()),
                   "prompt"};
  }
  return request;
}

HttpResponse Api::attention(HttpRequest& request) {
  const auto [layer, head, tokens] = read_map_request(request.body);
  request.drop_body();
  AttentionMap map;
  if (!engine_.run_alone([&, &tokens = tokens, layer = layer, head = head] {
        map = model_.map(tokens, layer, head);
      })) {
    throw ApiError{503, "the server is busy or about to end; try again later", ""};
  }
  Json names = Json::array();
  for (const int32_t token : tokens) names.push_back(token_name(model_.tokenizer, token));
  Json weights = Json::array();  // the triangle of what each token sees
  const auto length = static_cast<size_t>(map.tokens);
  for (size_t j = 0; j < length; ++j) {
    const auto row = map.weights_TT.begin() + static_cast<ptrdiff_t>(j * length);
    weights.push_back(std::vector<float>(row, row + static_cast<ptrdiff_t>(j) + 1));
  }
  return json_response({{"tokens", std::move(names)},
                        {"layer", layer},
                        {"head", head},
                        {"weights", map.tokens > 0 ? std::move(weights) : Json()},
                        {"remainder", map.remainder_T.empty() ? Json() : Json(map.remainder_T)}});
}

HttpResponse Api::metrics() const {
  const EngineStats stats = engine_.stats();
  std::string text;
  const auto gauge = [&](const char* name, const char* help, int64_t value) {
    text += metric(name, "gauge", help, static_cast<double>(value));
  };
  const auto counter = [&](const char* name, const char* help, int64_t value) {
    text += metric(name, "counter", help, static_cast<double>(value));
  };
  gauge("sequences_running", "Sequences that are being continued.", stats.running);
  gauge("sequences_waiting", "Sequences in the queue.", stats.waiting);
  counter("sequences_finished_total", "Sequences that have ended, for whatever reason.",
          stats.finished);
  counter("sequences_left_total", "Sequences whose client has left.", stats.left);
  counter("sequences_expired_total", "Sequences that took longer than the time limit.",
          stats.expired);
  if (stats.cache.most_bytes > 0) {
    counter("sequences_without_room_total",
            "Sequences that ended because the cache had no room for their keys.", stats.no_room);
    gauge("cache_bytes", "Bytes of the keys that are kept.", stats.cache.bytes);
    gauge("cache_most_bytes", "Bytes that they may take.", stats.cache.most_bytes);
    counter("cache_keys_seen_total", "Keys of all sequences, over layers and heads.",
            stats.cache.seen);
    counter("cache_keys_kept_total", "Those of them that were kept.", stats.cache.kept);
  }
  counter("prompt_tokens_total", "Tokens of prompts that were run.", stats.prompt_tokens);
  counter("generated_tokens_total", "Tokens that were drawn.", stats.generated_tokens);
  counter("decode_steps_total", "Decode steps.", stats.steps);
  if (const HttpServer* server = server_) {
    gauge("connections", "Open connections.", server->connections());
    counter("connections_refused_total", "Connections refused because of their number.",
            server->refused_connections());
  }
  text +=
      "# HELP sbtrain_request_seconds Time to the answer, of a stream to its beginning.\n"
      "# TYPE sbtrain_request_seconds summary\n";
  const std::lock_guard lock(mutex_);
  for (const auto& [key, seconds] : answers_) {
    const std::string labels = fmt::format("{{path=\"{}\",status=\"{}\"}}", key.first, key.second);
    text +=
        fmt::format("sbtrain_request_seconds_sum{0} {1}\nsbtrain_request_seconds_count{0} {2}\n",
                    labels, seconds.sum, seconds.count);
  }
  HttpResponse response;
  response.type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = std::move(text);
  return response;
}

}  // namespace sbtrain
