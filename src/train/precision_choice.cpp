#include "train/precision_choice.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/error.h"
#include "core/files.h"
#include "core/target.h"
#include "model/transformer.h"
#include "ops/memory.h"
#include "parallel/mesh.h"
#include "train/random_rows.h"
#include "train/run_folder.h"
#include "train/step.h"

namespace sbtrain {
namespace {

constexpr double kLeastGain = 1.02;
constexpr int64_t kMostMicroBatches = 4;  // of a timed step
constexpr int64_t kVocabulary = 512;
constexpr int kWarmup = 2, kSteps = 5;

// One layer of each kind, and as much of a step as one rank has.
Config timed_config(const Config& config, int ranks) {
  Config timed = config;
  TrainConfig& train = timed.train;
  timed.model.layers =
      std::min(config.model.layers, static_cast<int64_t>(config.model.attention.size()));
  timed.model.vocab = std::min(config.model.vocab, kVocabulary);
  train.sharding = Sharding::kFull;
  train.sequence_length /= train.context_parallel;
  const int64_t data_ranks = std::max<int64_t>(ranks / train.context_parallel, 1);
  train.context_parallel = 1;
  const int64_t micro_batches = train.batch / (train.micro_batch * data_ranks);
  train.batch = train.micro_batch * std::clamp<int64_t>(micro_batches, 1, kMostMicroBatches);
  return timed;
}

// The shortest of some steps.
double step_seconds(Config config, Backend backend, Precision precision) {
  config.train.precision = precision;
  const auto alone = make_single_process();
  const Mesh mesh(*alone);
  const Transformer model(config.model, config.train.recompute);
  Memory memory(backend);
  Stream stream(memory);
  TrainStep step(config, model, stream, mesh);
  step.params().initialize(config.seed);
  step.tune("", /*remember=*/false);
  const std::vector<PackedBatch> batches(
      static_cast<size_t>(config.train.batch / config.train.micro_batch),
      random_rows(config.train, config.model, targets_of_row(config)));
  double shortest = 0;
  for (int n = 0; n < kWarmup + kSteps; ++n) {
    ops::run(stream, ops::Synchronize{});
    const auto start = std::chrono::steady_clock::now();
    step.run(batches, /*lr=*/0.0).wait();
    ops::run(stream, ops::Synchronize{});
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (n == kWarmup || (n > kWarmup && seconds.count() < shortest)) shortest = seconds.count();
  }
  return shortest;
}

PrecisionChoice timed_choice(const Config& config, Backend backend, int ranks) {
  if (backend != Backend::kCuda) return {Precision::kBf16, "without a GPU fp8 is only emulated"};
  const int sm = present_target(backend).sm;
  if (sm < 89) {
    return {Precision::kBf16, fmt::format("the GPU has compute capability {}.{}, and fp8 needs 8.9",
                                          sm / 10, sm % 10)};
  }
  const Config timed = timed_config(config, ranks);
  const double bf16 = step_seconds(timed, backend, Precision::kBf16);
  const double fp8 = step_seconds(timed, backend, Precision::kFp8);
  return {bf16 > kLeastGain * fp8 ? Precision::kFp8 : Precision::kBf16,
          fmt::format("a step of {} layer(s) takes {:.2f} ms in bf16 and {:.2f} ms in fp8",
                      timed.model.layers, 1e3 * bf16, 1e3 * fp8)};
}

std::string to_json(const PrecisionChoice& choice) {
  return nlohmann::json{{"precision", name_of(choice.precision)}, {"reason", choice.reason}}.dump(
             2) +
         "\n";
}

PrecisionChoice parse_choice(const std::string& text, const std::filesystem::path& file) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (json.is_object() && json.contains("precision") && json["precision"].is_string()) {
    const std::string name = json["precision"];
    for (const Precision precision : {Precision::kBf16, Precision::kFp8}) {
      if (name == name_of(precision)) return {precision, json.value("reason", "")};
    }
  }
  fail(ExitCode::kStorage,
       "{}: \"precision\" is neither \"bf16\" nor \"fp8\"; delete the file to have the choice made "
       "again",
       file.string());
}

}  // namespace

PrecisionChoice choose_precision(const Config& config, Backend backend, Communicator& ranks) {
  const PrecisionChoice mine = timed_choice(config, backend, ranks.world());
  return parse_choice(ranks.broadcast(to_json(mine), 0), "rank 0");
}

PrecisionChoice keep_precision(const Config& config, Backend backend, Communicator& ranks,
                               const std::filesystem::path& file, bool writes) {
  const std::string kept = ranks.broadcast(writes ? text_of_run_file(file) : "", 0);
  if (!kept.empty()) return parse_choice(kept, file);
  PrecisionChoice choice = choose_precision(config, backend, ranks);
  if (writes) replace_file(file, to_json(choice), {}, MissingFolders::kError);
  return choice;
}

}  // namespace sbtrain
