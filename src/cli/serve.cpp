// sbtrain serve: completions of a checkpoint's model over HTTP.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <thread>

#include "checkpoint/checkpoint.h"
#include "cli/backend.h"
#include "cli/cache_options.h"
#include "cli/cli.h"
#include "cli/rope_options.h"
#include "cli/run_tokenizer.h"
#include "config/stored_config.h"
#include "core/files.h"
#include "core/log.h"
#include "core/memory_check.h"
#include "serve/api.h"
#include "serve/decode_batch.h"
#include "serve/engine.h"
#include "serve/http_server.h"
#include "serve/inference.h"

namespace sbtrain {
namespace {

constexpr const char* kTokenVariable = "SERVE_TOKEN";
constexpr int64_t kUsualLength = 2048;  // the context that lm-evaluation-harness expects

struct ServeOptions {
  std::string checkpoint;
  std::string tokenizer;
  std::string name;
  DeviceChoice device = DeviceChoice::kAuto;
  RopeOptions rope;
  std::string host = "127.0.0.1";
  int port = 8000;
  std::string token_file;
  int64_t slots = 16;
  int64_t max_length = 0;
  KeyDropping dropping;
  EngineLimits engine;
  HttpLimits http;
  int64_t body_kib = 4096;
  int64_t bodies_mib = 0;
  int64_t time_limit = 600;
  int64_t drain_time = 30;
};

int stop_descriptor = -1;  // NOLINT: what a signal handler can reach

void on_stop(int number) {
  const int saved = errno;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = ::write(stop_descriptor, &one, sizeof(one));
  // A second Ctrl-C does not wait for answers that have begun.
  if (number == SIGINT) std::signal(SIGINT, SIG_DFL);
  errno = saved;
}

// From here on, SIGTERM, SIGINT and SIGUSR1 ask the server to end.
class StopSignal {
 public:
  StopSignal() : descriptor_(::eventfd(0, EFD_CLOEXEC)) {
    if (descriptor_ < 0) fail(ExitCode::kOutOfMemory, "no descriptor is left for the server");
    stop_descriptor = descriptor_;
    struct sigaction action {};
    action.sa_handler = on_stop;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (const int number : {SIGTERM, SIGINT, SIGUSR1}) sigaction(number, &action, nullptr);
  }
  ~StopSignal() {
    stop_descriptor = -1;
    ::close(descriptor_);
  }
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  void wait() const {
    uint64_t count = 0;
    while (::read(descriptor_, &count, sizeof(count)) < 0 && errno == EINTR) {
    }
  }
  // Ends wait() as a signal would.
  void raise() const { on_stop(0); }

 private:
  int descriptor_;
};

std::string read_token(const ServeOptions& options) {
  std::string token;
  std::string where = options.token_file;
  if (!options.token_file.empty()) {
    token = read_input(options.token_file, ExitCode::kUsage);
  } else if (const char* variable = std::getenv(kTokenVariable)) {
    token = variable;
    where = kTokenVariable;
  } else {
    return "";
  }
  token.erase(token.find_last_not_of(" \t\r\n") + 1);
  if (token.empty()) {
    fail(ExitCode::kUsage, "{}: the token is empty; {}", where,
         options.token_file.empty() ? "unset the variable to serve without one"
                                    : "write one into the file");
  }
  const auto is_control = [](unsigned char c) { return c < 0x20 || c == 0x7f; };
  if (std::ranges::any_of(token, is_control)) {
    fail(ExitCode::kUsage, "{}: the token must be one line, which a header can hold", where);
  }
  return token;
}

// A checkpoint's model with its tokenizer, and all that serves it.
class ModelServer {
 public:
  explicit ModelServer(const ServeOptions& options)
      : options_(options),
        token_(read_token(options)),
        checkpoint_(open_checkpoint(options.checkpoint)),
        config_(load_config()),
        text_(training_text(checkpoint_)),
        tokenizer_(load_tokenizer(checkpoint_, config_, text_, options.tokenizer)) {}

  ExitCode run() {
    const int64_t capacity = context_length();
    const Backend backend = select_backend(options_.device);
    const HttpLimits limits = http_limits();
    MemoryReport plan = plan_serving(config_.model, backend, options_.slots, capacity,
                                     /*prompts_in_parts=*/true, options_.dropping);
    plan_bodies(backend, plan, limits.bodies_memory);
    require_room(backend, plan,
                 "Serve with fewer --slots or a smaller --max-length or --bodies-mib, or drop keys "
                 "with --drop-below and a smaller --cache-share.");
    InferenceModel model(config_.model, checkpoint_, backend, plan);
    DecodeBatch batch(model.model(), model.params(), model.stream(), options_.slots, capacity,
                      {.vocab = tokenizer_.size(), .dropping = options_.dropping});
    Engine engine(batch, options_.engine);
    Api api(engine, served(model),
            {.token = token_, .host = options_.host, .time_limit = time_limit()});
    HttpServer server(
        options_.host, options_.port, limits,
        {.answer = [&](HttpRequest request) { return api.answer(std::move(request)); },
         .refusal = [&](const HttpRequest& request) { return api.refusal(request); },
         .refused = [&](int status,
                        const std::string& message) { return api.refused(status, message); }});
    api.set_server(&server);
    const StopSignal stop;
    server.start();
    announce(server, capacity);
    std::thread drain([&] {
      stop.wait();
      log_info("ending: answers that have begun have {} s", options_.drain_time);
      api.drain();
      engine.close(ServeClock::now() + std::chrono::seconds(options_.drain_time));
    });
    try {
      engine.run();
    } catch (...) {
      end(stop, drain, server);
      throw;
    }
    end(stop, drain, server);
    return ExitCode::kDone;
  }

 private:
  Config load_config() const {
    Config config = stored_config(checkpoint_);
    options_.rope.apply(config);
    return config;
  }

  std::chrono::seconds time_limit() const { return std::chrono::seconds(options_.time_limit); }

  int64_t context_length() const {
    const int64_t positions = config_.model.max_positions;
    const bool learned = config_.model.position == PositionEmbedding::kLearned;
    const int64_t usual = std::max(kUsualLength, config_.train.sequence_length);
    if (options_.max_length == 0) return learned ? std::min(usual, positions) : usual;
    if (options_.max_length < 2) {
      fail(ExitCode::kUsage, "--max-length: a sequence has a token to begin with and one more");
    }
    if (learned && options_.max_length > positions) {
      fail(ExitCode::kUsage, "--max-length: the model has {} positions", positions);
    }
    return options_.max_length;
  }

  HttpLimits http_limits() const {
    HttpLimits limits = options_.http;
    limits.body_bytes = options_.body_kib << 10;
    const int64_t of_one = limits.body_bytes * HttpLimits::kMemoryOfBodyByte;
    if (options_.bodies_mib == 0) {
      limits.bodies_memory = std::max(limits.bodies_memory, of_one);
      return limits;
    }
    limits.bodies_memory = options_.bodies_mib << 20;
    if (limits.bodies_memory < of_one) {
      fail(ExitCode::kUsage,
           "--bodies-mib: one body of {} KiB (--body-kib) may take {} MiB while it is read",
           options_.body_kib, (of_one + (1 << 20) - 1) >> 20);
    }
    return limits;
  }

  // Bodies lie in the host's memory, which is the model's too without a GPU.
  static void plan_bodies(Backend backend, MemoryReport& plan, int64_t bytes) {
    MemoryReport bodies;
    MemoryReport& of = backend == Backend::kCpu ? plan : bodies;
    of.persistent[static_cast<size_t>(MemoryClass::kInputs)] += static_cast<size_t>(bytes);
    if (backend == Backend::kCpu) return;
    require_memory(Backend::kCpu, bodies, "the server, for the requests that it reads at once,",
                   "Serve with a smaller --bodies-mib.");
  }

  ServedModel served(InferenceModel& model) const {
    return {.name = options_.name.empty() ? config_.name : options_.name,
            .tokenizer = tokenizer_,
            .starts_with_bos = text_.starts_with_bos,
            .layers = config_.model.layers,
            .heads = config_.model.heads,
            .map = [&model](const std::vector<int32_t>& tokens, int64_t layer, int64_t head) {
              return model.attention_map(tokens, layer, head);
            }};
  }

  void announce(const HttpServer& server, int64_t capacity) const {
    if (!server.is_local() && token_.empty()) {
      log_warning(
          "everybody who reaches {} can use this server: it asks for no token "
          "(--token-file)",
          options_.host);
    }
    const bool v6 = options_.host.find(':') != std::string::npos;
    // For people and scripts; the port is chosen here with --port 0.
    fmt::print("serving step {} on http://{}{}{}:{}/ ({} sequences of {} tokens)\n",
               checkpoint_.manifest().step, v6 ? "[" : "", options_.host, v6 ? "]" : "",
               server.port(), options_.slots, capacity);
    std::fflush(stdout);
  }

  // The engine has ended: everything is answered, and what is left is to be sent.
  static void end(const StopSignal& stop, std::thread& drain, HttpServer& server) {
    stop.raise();
    drain.join();
    server.close(std::chrono::seconds(5));
  }

  const ServeOptions& options_;
  std::string token_;
  CheckpointReader checkpoint_;
  Config config_;
  TrainingText text_;
  Tokenizer tokenizer_;
};

void add_limits(Command command, ServeOptions& options) {
  const char* limits = "Limits";
  const Check positive = whole_numbers(int64_t{1}, int64_t{1} << 30);
  const auto add = [&](const char* name, auto& value, const char* help) {
    command.add_option(name, value, help).check(positive).capture_default_str().group(limits);
  };
  add("--queue", options.engine.waiting, "Sequences that may wait for a slot");
  add("--prefill-tokens", options.engine.prompt_tokens,
      "Prompt tokens that may run between two decode steps; a longer prompt runs as many of its "
      "layers, at least one");
  add("--connections", options.http.connections, "Connections at once");
  add("--body-kib", options.body_kib, "KiB of a request's body");
  command
      .add_option("--bodies-mib", options.bodies_mib,
                  "MiB of memory for all bodies that are being read, of which a byte counts as "
                  "40; 0: 512, or as much as one body needs")
      .check(whole_numbers(int64_t{0}, int64_t{1} << 30))
      .capture_default_str()
      .group(limits);
  add("--time-limit", options.time_limit, "Seconds that a request may take, its wait included");
  add("--drain-time", options.drain_time,
      "Seconds for answers that have begun when the server is asked to end");
}

}  // namespace

void add_serve(Command app, Action& action) {
  auto options = std::make_shared<ServeOptions>();
  Command command =
      app.add_subcommand("serve", "Answer completion requests over HTTP with a trained model");
  command.add_option("--checkpoint", options->checkpoint, "Run folder or checkpoint").required();
  command.add_option("--tokenizer", options->tokenizer,
                     "Tokenizer of the training data; default: the run's");
  command.add_option("--name", options->name, "What the model is called; default: the run's name");
  options->rope.add(command);
  command.add_option("--host", options->host, "Address to listen on").capture_default_str();
  command.add_option("--port", options->port, "Port to listen on; 0: a free one")
      .check(whole_numbers(0, 65535))
      .capture_default_str();
  command.add_option(
      "--token-file", options->token_file,
      "File with a token that clients must send; default: that of the environment variable "
      "SERVE_TOKEN, or none");
  command.add_option("--slots", options->slots, "Sequences that are continued together at most")
      .check(whole_numbers(int64_t{1}, int64_t{1024}))
      .capture_default_str();
  command
      .add_option("--max-length", options->max_length,
                  "Tokens of a sequence at most, its prompt included; 0: 2048, or the length in "
                  "training if that is more")
      .check(whole_numbers(int64_t{0}, int64_t{1} << 24))
      .capture_default_str();
  command.add_choice("--device", options->device, "auto, cpu or cuda");
  add_cache_options(command, options->dropping);
  add_limits(command, *options);
  command.callback(
      [options, &action] { action = [options] { return ModelServer(*options).run(); }; });
}

}  // namespace sbtrain
