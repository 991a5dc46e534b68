// Times decoding: one token more for each of several sequences, with all that serving does for it
// but HTTP.
#include <algorithm>
#include <chrono>

#include "bench/bench.h"
#include "bench/timing.h"
#include "core/philox.h"
#include "parallel/mesh.h"
#include "parallel/sharded_params.h"
#include "serve/decode_batch.h"
#include "serve/inference.h"
#include "serve/sampling.h"

namespace sbtrain {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

class DecodeBench {
 public:
  DecodeBench(const Transformer& model, ParamAccess& params, Stream& s,
              const DecodeBenchOptions& options, int64_t sequences)
      : s_(s),
        options_(options),
        batch_(model, params, s, sequences, capacity(options)),
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
    // In steps of their own, since to be timed slows an op down.
    OpProfile profile;
    s_.set_profile(&profile);
    for (int64_t i = 0; i < options_.steps; ++i) step();
    s_.set_profile(nullptr);
    for (const auto& [op, entry] : profile.entries()) {
      row.parts.push_back({op, entry.seconds / static_cast<double>(options_.steps)});
    }
    row.parts.push_back({"sampling", sampling_seconds_ / static_cast<double>(steps_)});
    std::ranges::sort(row.parts, std::greater(), &BenchPart::seconds);
    return row;
  }

 private:
  void step() {
    const Clock::time_point start = Clock::now();
    for (int64_t slot = 0; slot < batch_.slots(); ++slot) {
      tokens_[static_cast<size_t>(slot)] = sample_token(batch_.logits(slot), {.temperature = 0}, 0);
    }
    sampling_seconds_ += seconds_since(start);
    ++steps_;
    batch_.step(tokens_);
  }

  Stream& s_;
  const DecodeBenchOptions& options_;
  DecodeBatch batch_;
  std::vector<int32_t> tokens_;
  std::vector<double> prefill_seconds_;
  double sampling_seconds_ = 0;
  int64_t steps_ = 0;
};

}  // namespace

std::vector<DecodeBenchRow> bench_decode(const Config& config, Backend backend,
                                         const DecodeBenchOptions& options) {
  const int64_t most = *std::ranges::max_element(options.sequences);
  require_room(backend, plan_serving(config.model, backend, most, DecodeBench::capacity(options)));
  Memory memory(backend);
  Stream s(memory);
  const Transformer model(config.model);
  const std::unique_ptr<Communicator> communicator = make_single_process();
  const Mesh mesh(*communicator);
  ShardedParams params(model.registry(), s, mesh, /*with_training=*/false);
  params.initialize(config.seed);
  const auto weight_bytes = static_cast<double>(model.registry().count()) *
                            static_cast<double>(dtype_size(memory.compute_dtype()));
  std::vector<DecodeBenchRow> rows;
  for (const int64_t sequences : options.sequences) {
    rows.push_back(DecodeBench(model, params, s, options, sequences).run());
    rows.back().weight_bytes = weight_bytes;
  }
  return rows;
}

}  // namespace sbtrain
