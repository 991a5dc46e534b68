#include "bench/skipping.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>

#include "bench/timing.h"
#include "checkpoint/model_state.h"
#include "config/schema.h"
#include "core/error.h"
#include "core/memory_check.h"
#include "core/number_text.h"
#include "data/packing.h"
#include "eval/reach.h"
#include "eval/windows.h"
#include "model/inference/maps.h"
#include "model/transformer.h"
#include "ops/attention.h"
#include "ops/memory.h"
#include "ops/optimizer.h"
#include "parallel/mesh.h"
#include "parallel/sharded_params.h"

namespace sbtrain {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kEpsilon = "skip_epsilon";

// The module with another skip_epsilon, if it has one.
AttentionConfig with_epsilon(const AttentionConfig& attention, double epsilon) {
  std::map<std::string, std::string> options = flatten(attention);
  const auto found = options.find(kEpsilon);
  if (found == options.end()) return attention;
  found->second = fmt::format("{}", epsilon);
  std::string text;
  for (const auto& [key, value] : options) text += fmt::format("{}: {}\n", key, value);
  return parse_attention(text);
}

ModelConfig with_epsilon(ModelConfig model, double epsilon) {
  for (AttentionConfig& attention : model.attention) attention = with_epsilon(attention, epsilon);
  return model;
}

bool skips_keys(const ModelConfig& model) {
  return std::ranges::any_of(model.attention, [](const AttentionConfig& attention) {
    return flatten(attention).contains(kEpsilon);
  });
}

// A batch in buffers of its own.
struct UploadedBatch {
  UploadedBatch(Stream& s, const PackedBatch& batch, int64_t length)
      : valid_targets(batch.valid_targets),
        tokens(upload(s, batch.tokens)),
        targets(upload(s, batch.targets)),
        positions(upload(s, batch.positions)),
        cu_seqlens(upload(s, batch.cu_seqlens)),
        tensors{.tokens_T = tokens,
                .targets_T = targets,
                .sequences = {.cu_seqlens = cu_seqlens,
                              .positions_T = positions,
                              .count = static_cast<int64_t>(batch.cu_seqlens.size()) - 1,
                              .max_seqlen = length}} {}
  static Buffer upload(Stream& s, const std::vector<int32_t>& values) {
    Buffer buffer = s.allocate(MemoryClass::kInputs, "batch", DType::kI32,
                               {static_cast<int64_t>(values.size())});
    ops::run(s, ops::CopyFromHost{.y = buffer, .host = values.data()});
    return buffer;
  }
  int64_t valid_targets;
  Buffer tokens, targets, positions, cu_seqlens;
  BatchTensors tensors;
};

// The passes of a model over batches of one size.
class Passes {
 public:
  Passes(Stream& s, ShardedParams& params, int64_t tokens)
      : s_(s),
        params_(params),
        loss_T_(s.allocate(MemoryClass::kInputs, "loss", DType::kF32, {tokens})) {}

  void forward(const Transformer& model, const BatchTensors& batch) {
    model.evaluate(s_, params_, batch, loss_T_);
  }
  void forward_backward(const Transformer& model, const BatchTensors& batch) {
    params_.begin({.first = true, .last = true});
    model.forward_backward(s_, params_, batch, loss_T_, /*loss_weight=*/1.0f, /*z_loss=*/0.0f);
    params_.join();
  }
  // The sum of the losses of the last pass.
  double loss_sum() { return ops::sum(s_, loss_T_); }

 private:
  Stream& s_;
  ShardedParams& params_;
  Buffer loss_T_;
};

// Refuses a batch for which the device has too little memory before anything is allocated.
void require_memory_for(const ModelConfig& config, Backend backend, int64_t tokens,
                        int64_t length) {
  Memory memory = Memory::planning(backend);
  Stream s(memory);
  const std::unique_ptr<Communicator> communicator = make_single_process();
  const Mesh mesh(*communicator);
  const Transformer model(config);
  ShardedParams params(model.registry(), s, mesh, make_optimizer());
  {
    const ProgramScope scope(memory, "training");
    PackedBatch batch;
    clear(batch, tokens);
    const auto size = static_cast<size_t>(tokens);
    batch.tokens.resize(size);
    batch.targets.resize(size);
    batch.positions.resize(size);
    for (int64_t t = 0; t <= tokens; t += length) {
      batch.cu_seqlens.push_back(static_cast<int32_t>(t));
    }
    const UploadedBatch uploaded(s, batch, length);
    Passes(s, params, tokens).forward_backward(model, uploaded.tensors);
  }
  require_memory(backend, memory.report(), "the model, with the tokens of a batch,",
                 "Lower --tokens or --lengths.");
}

class SkippingBench {
 public:
  SkippingBench(const CheckpointReader& checkpoint, const Config& config, Backend backend,
                const SkippingBenchOptions& options)
      : options_(options),
        memory_(backend),
        s_(memory_),
        communicator_(make_single_process()),
        mesh_(*communicator_),
        model_(config.model),
        params_(model_.registry(), s_, mesh_, make_optimizer()) {
    load_params(checkpoint, params_, /*with_state=*/false);
    // All of them have the parameters of model_.
    for (const double epsilon : options.epsilons) {
      models_.emplace_back(with_epsilon(config.model, epsilon));
    }
  }

  void add_rows(const WindowReader& reader, int64_t length, std::vector<SkippingBenchRow>& rows) {
    const int64_t at_once = std::max<int64_t>(1, options_.tokens / length);
    std::vector<Window> windows = reader.of_length(length, options_.batches * at_once * length);
    const int64_t per_batch = std::min(at_once, static_cast<int64_t>(windows.size()));
    std::vector<UploadedBatch> batches;
    for (size_t first = 0; first + per_batch <= windows.size(); first += per_batch) {
      const auto group = std::span(windows).subspan(first, static_cast<size_t>(per_batch));
      batches.emplace_back(s_, reader.batch_of(group, length), length);
    }
    for (size_t i = 0; i < models_.size(); ++i) {
      SkippingBenchRow row{.length = length,
                           .epsilon = options_.epsilons[i],
                           .windows = per_batch * static_cast<int64_t>(batches.size()),
                           .batch_tokens = per_batch * length};
      count_keys(row, models_[i], batches);
      measure(row, models_[i], batches);
      rows.push_back(std::move(row));
    }
  }

 private:
  void count_keys(SkippingBenchRow& row, const Transformer& model,
                  const std::vector<UploadedBatch>& batches) {
    std::vector<KeysRead> layers(static_cast<size_t>(model.config().layers));
    for (const UploadedBatch& batch : batches) {
      const std::vector<KeysRead> more = keys_read(s_, model, params_, batch.tensors);
      for (size_t l = 0; l < layers.size(); ++l) layers[l] += more[l];
    }
    for (const KeysRead& layer : layers) row.keys_read_by_layer.push_back(share_read(layer));
    row.keys_read = share_read(all_of(layers));
  }

  void measure(SkippingBenchRow& row, const Transformer& model,
               const std::vector<UploadedBatch>& batches) {
    Passes passes(s_, params_, row.batch_tokens);
    double loss_sum = 0;
    int64_t targets = 0;
    for (const UploadedBatch& batch : batches) {
      passes.forward_backward(model, batch.tensors);  // allocates what the timed calls use again
      passes.forward(model, batch.tensors);
      loss_sum += passes.loss_sum();
      targets += batch.valid_targets;
    }
    row.loss = without_nan_sign(loss_sum / static_cast<double>(targets));

    const auto count = static_cast<int64_t>(batches.size());
    const int64_t calls = count * options_.repeats;
    const auto tensors = [&](int64_t n) { return batches[static_cast<size_t>(n % count)].tensors; };
    row.model_forward = median_of(calls, [&](int64_t n) { passes.forward(model, tensors(n)); });
    row.model_training =
        median_of(calls, [&](int64_t n) { passes.forward_backward(model, tensors(n)); });
    const OpProfile profile =
        profile_of(s_, calls, [&](int64_t n) { passes.forward_backward(model, tensors(n)); });
    const auto seconds = [&](std::string_view op) {
      const auto entry = profile.entries().find(op);
      const bool ran = entry != profile.entries().end();
      return ran ? entry->second.seconds / static_cast<double>(calls) : 0.0;
    };
    row.attention_forward =
        seconds(ops::StickBreakingForward::kName) + seconds(ops::SoftmaxForward::kName);
    row.attention_backward =
        seconds(ops::StickBreakingBackward::kName) + seconds(ops::SoftmaxBackward::kName);
  }

  double median_of(int64_t calls, const std::function<void(int64_t)>& call) {
    std::vector<double> seconds;
    for (int64_t n = 0; n < calls; ++n) {
      ops::run(s_, ops::Synchronize{});
      const Clock::time_point start = Clock::now();
      call(n);
      ops::run(s_, ops::Synchronize{});
      seconds.push_back(seconds_since(start));
    }
    return median(std::move(seconds));
  }

  const SkippingBenchOptions& options_;
  Memory memory_;
  Stream s_;
  std::unique_ptr<Communicator> communicator_;
  Mesh mesh_;
  Transformer model_;
  ShardedParams params_;
  std::deque<Transformer> models_;  // one for each epsilon
};

}  // namespace

std::vector<SkippingBenchRow> bench_skipping(const CheckpointReader& checkpoint,
                                             const Config& config, Backend backend,
                                             const HeldOutOptions& text,
                                             SkippingBenchOptions options) {
  std::erase(options.epsilons, 0.0);
  if (!skips_keys(config.model)) options.epsilons.clear();
  options.epsilons.insert(options.epsilons.begin(), 0.0);
  const WindowReader reader(text);
  for (const int64_t length : options.lengths) {
    if (length > reader.longest_document()) {
      fail(ExitCode::kUsage, "--lengths: no document has {} tokens; the longest has {}", length,
           reader.longest_document());
    }
    const int64_t tokens = std::max<int64_t>(1, options.tokens / length) * length;
    require_memory_for(config.model, backend, tokens, length);
  }
  SkippingBench bench(checkpoint, config, backend, options);
  std::vector<SkippingBenchRow> rows;
  for (const int64_t length : options.lengths) bench.add_rows(reader, length, rows);
  return rows;
}

}  // namespace sbtrain
