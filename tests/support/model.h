// A model with its parameters and one packed micro-batch, on either backend.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/philox.h"
#include "data/batch.h"
#include "model/transformer.h"
#include "ops/memory.h"
#include "ops/optimizer.h"
#include "parallel/communicator.h"
#include "parallel/sharded_params.h"
#include "support/gpu.h"

namespace sbtrain::test {

// Documents of these lengths with random tokens. Some targets, and the last one of each document,
// are ignored. Another `index` gives other tokens.
inline PackedBatch packed_batch(const std::vector<int32_t>& lengths, int64_t vocab,
                                uint64_t index = 0) {
  PackedBatch batch;
  batch.cu_seqlens = {0};
  const Philox random(3, RandomPurpose::kTest, "packed batch", index);
  for (const int32_t length : lengths) {
    for (int32_t i = 0; i < length; ++i) {
      const size_t t = batch.tokens.size();
      const bool valid = i + 1 < length && t % 11 != 5;
      batch.tokens.push_back(static_cast<int32_t>(random.bits(2 * t) % vocab));
      batch.targets.push_back(valid ? static_cast<int32_t>(random.bits(2 * t + 1) % vocab) : -1);
      batch.positions.push_back(i);
      batch.valid_targets += valid;
    }
    batch.cu_seqlens.push_back(batch.cu_seqlens.back() + length);
  }
  return batch;
}

class ModelRun {
 public:
  // The weights are initialised with seed 5, and held for products in that precision.
  ModelRun(Backend backend, const ModelConfig& config, const PackedBatch& batch,
           Recompute recompute = Recompute::kNone, Precision held = Precision::kBf16)
      : memory_(backend),
        stream_(with_poison(memory_)),
        model_(config, recompute),
        communicator_(make_single_process()),
        mesh_(*communicator_),
        params_(model_.registry(), stream_, mesh_, make_optimizer(), ReduceType::kFloat32,
                TransferEngine::kMultiprocessors, /*ema=*/0, held),
        valid_(batch.valid_targets),
        tokens_T_(integers(batch.tokens)),
        targets_T_(integers(batch.targets)),
        positions_T_(integers(batch.positions)),
        cu_seqlens_(integers(batch.cu_seqlens)),
        loss_T_(reals(static_cast<int64_t>(batch.tokens.size()), 1)) {
    params_.initialize(5);
    int32_t longest = 0;
    for (size_t i = 1; i < batch.cu_seqlens.size(); ++i) {
      longest = std::max(longest, batch.cu_seqlens[i] - batch.cu_seqlens[i - 1]);
    }
    batch_ = {.tokens_T = tokens_T_,
              .targets_T = targets_T_,
              .sequences = {.cu_seqlens = cu_seqlens_,
                            .positions_T = positions_T_,
                            .count = static_cast<int64_t>(batch.cu_seqlens.size()) - 1,
                            .max_seqlen = longest}};
  }

  // Computes the gradients of the mean loss plus z-loss. Returns the mean loss.
  double backward(float z_loss = 0.0f) {
    model_.forward_backward(stream_, params_, batch_, loss_T_.tensor().reshaped({batch_.tokens()}),
                            1.0f / static_cast<float>(valid_), z_loss);
    return ops::sum(stream_, loss_T_) / static_cast<double>(valid_);
  }
  // Logits of all tokens, row by row.
  std::vector<float> logits() {
    const Buffer logits_TV = reals(batch_.tokens(), model_.config().vocab);
    model_.logits(stream_, params_, batch_, logits_TV);
    return download(logits_TV);
  }

  // The logical elements of every tensor in `of(shard)`, by the tensor's name.
  template <typename Of>
  std::map<std::string, std::vector<float>> tensors(Of of) {
    std::map<std::string, std::vector<float>> out;
    for (size_t u = 0; u < model_.registry().units().size(); ++u) {
      const std::vector<float> flat = download(of(params_.shard(static_cast<int>(u))));
      for (const PlacedTensor& tensor : model_.registry().units()[u].tensors) {
        std::vector<float>& values = out[tensor.name];
        values.resize(static_cast<size_t>(tensor.count));
        for_each_run(tensor, 0, tensor.stored, [&](const ElementRun& run) {
          std::copy_n(flat.begin() + tensor.offset + run.storage, run.count,
                      values.begin() + run.logical);
        });
      }
    }
    return out;
  }
  std::map<std::string, std::vector<float>> gradients() {
    return tensors([](const ShardedParams::Shard& shard) { return shard.gradient; });
  }
  std::map<std::string, std::vector<float>> masters() {
    return tensors([](const ShardedParams::Shard& shard) { return shard.weights; });
  }

  // Adds noise to parameters that start as constants: norms at 1 and biases at 0 hide mistakes.
  void disturb_constants() {
    change_masters([](const PlacedTensor& tensor, float* values) {
      if (tensor.spec.init.kind == Init::Kind::kNormal) return;
      const Philox random(9, RandomPurpose::kTest, tensor.name);
      for (int64_t i = 0; i < tensor.stored; ++i) {
        values[i] += static_cast<float>(0.1 * random.normal(i));
      }
    });
  }
  // Rounds the tensors with `part` in their names, so that compute weights are the same everywhere.
  void round_to_bf16(std::string_view part) {
    change_masters([&](const PlacedTensor& tensor, float* values) {
      if (tensor.name.find(part) == std::string::npos) return;
      for (int64_t i = 0; i < tensor.stored; ++i) values[i] = from_bf16(to_bf16(values[i]));
    });
  }

  Buffer integers(const std::vector<int32_t>& values) {
    Buffer buffer = memory_.allocate(MemoryClass::kInputs, "test", DType::kI32,
                                     {static_cast<int64_t>(values.size())});
    ops::run(stream_, ops::CopyFromHost{.y = buffer, .host = values.data()});
    return buffer;
  }
  Buffer reals(int64_t rows, int64_t cols) {
    return memory_.allocate(MemoryClass::kInputs, "test", DType::kF32, {rows, cols});
  }
  std::vector<float> download(const Tensor& x) {
    std::vector<float> values(static_cast<size_t>(x.numel()));
    ops::run(stream_, ops::CopyToHost{.host = values.data(), .x = x});
    return values;
  }

  const Transformer& model() const { return model_; }
  ShardedParams& params() { return params_; }
  Stream& stream() { return stream_; }
  const BatchTensors& batch() const { return batch_; }

 private:
  // Poisons released memory on the CPU only, where it costs little.
  static Memory& with_poison(Memory& memory) {
    if (memory.backend() == Backend::kCpu) memory.poison();
    return memory;
  }
  // Calls change(tensor, its stored elements) for every parameter.
  template <typename Change>
  void change_masters(Change&& change) {
    for (size_t u = 0; u < model_.registry().units().size(); ++u) {
      const Tensor& master = params_.shard(static_cast<int>(u)).weights;
      std::vector<float> flat = download(master);
      for (const PlacedTensor& tensor : model_.registry().units()[u].tensors) {
        change(tensor, flat.data() + tensor.offset);
      }
      ops::run(stream_, ops::CopyFromHost{.y = master, .host = flat.data()});
    }
    params_.refresh();
  }

  Memory memory_;
  Stream stream_;
  Transformer model_;
  std::unique_ptr<Communicator> communicator_;
  Mesh mesh_;
  ShardedParams params_;
  int64_t valid_;
  Buffer tokens_T_, targets_T_, positions_T_, cu_seqlens_, loss_T_;
  BatchTensors batch_;
};

inline std::vector<double> widened(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

}  // namespace sbtrain::test
