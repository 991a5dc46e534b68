// Times decoding: one token more for each of several sequences, with all that serving does for it
// but HTTP.
#include <algorithm>
#include <chrono>

#include "bench/bench.h"
#include "bench/timing.h"
#include "core/error.h"
#include "core/philox.h"
#include "ops/memory.h"
#include "parallel/mesh.h"
#include "parallel/sharded_params.h"
#include "serve/decode_batch.h"
#include "serve/inference.h"
#include "serve/sampling.h"

namespace sbtrain {
namespace {

using Clock = std::chrono::steady_clock;

class DecodeBench {
 public:
  DecodeBench(const Transformer& model, ParamAccess& params, Stream& s,
              const DecodeBenchOptions& options, int64_t sequences)
      : options_(options),
        batch_(
            model, params, s, sequences, capacity(options),
            {.recorded = options.graph, .overlap = options.overlap, .dropping = options.dropping}),
        tokens_(static_cast<size_t>(sequences)) {
    const Philox random(1, RandomPurpose::kTest, "bench tokens");
    const auto vocab = static_cast<uint64_t>(model.config().vocab);
    for (int64_t n = 0; n < sequences; ++n) {
      std::vector<int32_t> prompt;
      for (int64_t t = 0; t < options.context; ++t) {
        const auto place = static_cast<uint64_t>(n * options.context + t);
        prompt.push_back(static_cast<int32_t>(random.bits(place) % vocab));
      }
      const Clock::time_point start = Clock::now();
      batch_.start(prompt);
      prefill_seconds_.push_back(seconds_since(start));
    }
  }

  static int64_t capacity(const DecodeBenchOptions& options) {
    return options.context + options.warmup + 2 * options.steps;
  }

  DecodeBenchRow run() {
    DecodeBenchRow row{.sequences = batch_.slots()};
    row.prefill_tokens_per_second =
        static_cast<double>(options_.context) / median(prefill_seconds_);
    for (int64_t i = 0; i < options_.warmup; ++i) step();
    std::vector<double> seconds;
    for (int64_t i = 0; i < options_.steps; ++i) {
      const Clock::time_point start = Clock::now();
      step();
      seconds.push_back(seconds_since(start));
    }
    row.step_seconds = median(seconds);
    row.use = batch_.cache_use(/*now=*/true);
    // In steps of their own, since to be timed slows an op down.
    OpProfile profile;
    const int64_t timed = std::min<int64_t>(options_.steps, 16);
    batch_.set_profile(&profile);
    for (int64_t i = 0; i < timed; ++i) step();
    batch_.set_profile(nullptr);
    for (const auto& [op, entry] : profile.entries()) {
      row.parts.push_back({op, entry.seconds / static_cast<double>(timed)});
    }
    row.parts.push_back({"sampling", sampling_seconds_ / static_cast<double>(steps_)});
    std::ranges::sort(row.parts, std::greater(), &BenchPart::seconds);
    return row;
  }

 private:
  void step() {
    const Clock::time_point start = Clock::now();
    for (int64_t slot = 0; slot < batch_.slots(); ++slot) {
      tokens_[static_cast<size_t>(slot)] = batch_.draw(slot, {.temperature = 0}, 0);
    }
    sampling_seconds_ += seconds_since(start);
    ++steps_;
    batch_.step(tokens_);
  }

  const DecodeBenchOptions& options_;
  DecodeBatch batch_;
  std::vector<int32_t> tokens_;
  std::vector<double> prefill_seconds_;
  double sampling_seconds_ = 0;
  int64_t steps_ = 0;
};

// Bytes of the weights that a step reads: of a table that serves the embedding alone, it reads a
// few rows.
double weight_bytes(const Transformer& model, DType dtype) {
  const ModelConfig& config = model.config();
  int64_t count = model.registry().count();
  if (!config.tied) count -= config.vocab * config.width;
  return static_cast<double>(count) * static_cast<double>(dtype_size(dtype));
}

// Bytes that one sequence's cache has after `tokens` tokens, all of which a step reads.
double cache_bytes(const Transformer& model, const Target& target, int64_t tokens) {
  Memory memory = Memory::planning(target);
  const DecodeCache cache(memory, model, 1, tokens);
  return static_cast<double>(memory.report().total_bytes());
}

// Bytes read and written a second by a copy that moves `bytes` bytes in all, within limits. What
// fits a cache is copied, as it would be read, faster than memory is.
double copy_rate(Stream& s, double bytes) {
  constexpr double kLeast = 1 << 20;
  constexpr double kMost = 1 << 30;
  constexpr int64_t kCols = 4096;
  const DType dtype = s.memory().compute_dtype();
  const auto rows = static_cast<int64_t>(std::clamp(bytes, kLeast, kMost) /
                                         (2.0 * kCols * static_cast<double>(dtype_size(dtype))));
  const auto buffer = [&] {
    return s.memory().allocate(MemoryClass::kScratch, "copied", dtype, {rows, kCols});
  };
  const Buffer from = buffer();
  const Buffer to = buffer();
  ops::run(s, ops::Fill{.x = from, .value = 1.0f});
  std::vector<double> seconds;
  constexpr int kRounds = 9;
  constexpr int kCopies = 8;
  for (int round = 0; round < kRounds; ++round) {
    ops::run(s, ops::Synchronize{});
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < kCopies; ++i) ops::run(s, ops::Copy{.y = to, .x = from});
    ops::run(s, ops::Synchronize{});
    seconds.push_back(seconds_since(start) / kCopies);
  }
  return static_cast<double>(from.tensor().bytes() + to.tensor().bytes()) / median(seconds);
}

}  // namespace

std::vector<DecodeBenchRow> bench_decode(const Config& config, Backend backend,
                                         const DecodeBenchOptions& options) {
  const int64_t most = *std::ranges::max_element(options.sequences);
  const int64_t longest = DecodeBench::capacity(options);
  if (config.model.max_positions > 0 && longest > config.model.max_positions) {
    fail(ExitCode::kUsage,
         "{} tokens (--context, twice --steps and {} that warm up) are more than the model's {} "
         "learned positions",
         longest, options.warmup, config.model.max_positions);
  }
  require_room(backend,
               plan_serving(config.model, backend, most, longest,
                            /*prompts_in_parts=*/false, options.dropping),
               "Measure fewer --sequences or a shorter --context.");
  Memory memory(backend);
  Stream s(memory);
  const Transformer model(config.model);
  const std::unique_ptr<Communicator> communicator = make_single_process();
  const Mesh mesh(*communicator);
  ShardedParams params(model.registry(), s, mesh, /*optimizer=*/nullptr);
  params.initialize(config.seed);
  std::vector<DecodeBenchRow> rows;
  for (const int64_t sequences : options.sequences) {
    rows.push_back(DecodeBench(model, params, s, options, sequences).run());
    DecodeBenchRow& row = rows.back();
    row.weight_bytes = weight_bytes(model, memory.compute_dtype());
    row.cache_bytes = static_cast<double>(sequences) *
                          cache_bytes(model, memory.target(),
                                      options.context + options.warmup + options.steps / 2) -
                      static_cast<double>(row.use.seen - row.use.kept) *
                          static_cast<double>(kept_key_bytes(config.model, memory.compute_dtype()));
    row.copy_rate = copy_rate(s, row.weight_bytes + row.cache_bytes);
  }
  return rows;
}

}  // namespace sbtrain
