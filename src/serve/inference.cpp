#include "serve/inference.h"

#include <array>
#include <numeric>

#include "checkpoint/model_state.h"
#include "core/memory_check.h"
#include "ops/memory.h"
#include "ops/optimizer.h"
#include "serve/decode_batch.h"

namespace sbtrain {
namespace {

Backend with_room(Backend backend, const MemoryReport& plan) {
  require_room(backend, plan);
  return backend;
}

// Runs `program(s, model, params)` on a model without memory, and returns what it would take.
template <typename Program>
MemoryReport planned(const ModelConfig& config, Backend target, const Program& program) {
  Memory memory = Memory::planning(target);
  Stream stream(memory);
  const std::unique_ptr<Communicator> communicator = make_single_process();
  const Mesh mesh(*communicator);
  const Transformer model(config);
  ShardedParams params(model.registry(), stream, mesh, /*optimizer=*/nullptr);
  {
    const ProgramScope scope(memory, "inference");
    program(stream, model, params);
  }
  return memory.report();
}

Buffer input(Stream& s, const char* name, DType dtype, int64_t n) {
  return s.memory().allocate(MemoryClass::kInputs, name, dtype, {n});
}

}  // namespace

void require_room(Backend backend, const MemoryReport& plan, const std::string& advice) {
  require_memory(backend, plan, "the model, with the tokens that it is given at once,", advice);
}

InferenceModel::InferenceModel(const ModelConfig& config, const CheckpointReader& checkpoint,
                               Backend backend, const MemoryReport& plan)
    : memory_(with_room(backend, plan)),
      stream_(memory_),
      model_(config),
      communicator_(make_single_process()),
      mesh_(*communicator_),
      params_(model_.registry(), stream_, mesh_, /*optimizer=*/nullptr) {
  load_params(checkpoint, params_, /*with_state=*/false);
}

Buffer InferenceModel::upload(const char* name, const std::vector<int32_t>& values) {
  Buffer buffer = memory_.allocate(MemoryClass::kInputs, name, DType::kI32,
                                   {static_cast<int64_t>(values.size())});
  ops::run(stream_, ops::CopyFromHost{.y = buffer, .host = values.data()});
  return buffer;
}

// Room for one f32 for each token of the batch.
Buffer InferenceModel::token_values(const char* name, const PackedBatch& batch) {
  return memory_.allocate(MemoryClass::kInputs, name, DType::kF32,
                          {static_cast<int64_t>(batch.tokens.size())});
}

InferenceModel::Uploaded InferenceModel::uploaded(const PackedBatch& batch, int64_t max_seqlen) {
  Uploaded to{.tokens_T = upload("tokens", batch.tokens),
              .targets_T = upload("targets", batch.targets),
              .positions_T = upload("positions", batch.positions),
              .cu_seqlens = upload("cu_seqlens", batch.cu_seqlens),
              .batch = {}};
  to.batch = {.tokens_T = to.tokens_T,
              .targets_T = to.targets_T,
              .sequences = {.cu_seqlens = to.cu_seqlens,
                            .positions_T = to.positions_T,
                            .count = static_cast<int64_t>(batch.cu_seqlens.size()) - 1,
                            .max_seqlen = max_seqlen}};
  return to;
}

void InferenceModel::evaluate(const PackedBatch& batch, int64_t max_seqlen, Tensor loss_T,
                              Tensor hits_T) {
  const Uploaded from = uploaded(batch, max_seqlen);
  model_.evaluate(stream_, params_, from.batch, loss_T, hits_T);
}

std::vector<std::vector<KeysRead>> InferenceModel::keys_read_by_head(const PackedBatch& batch,
                                                                     int64_t max_seqlen) {
  const Uploaded from = uploaded(batch, max_seqlen);
  return sbtrain::keys_read_by_head(stream_, model_, params_, from.batch);
}

BatchScore InferenceModel::score(const PackedBatch& batch, int64_t max_seqlen) {
  const Buffer loss_T = token_values("loss", batch);
  const Buffer hits_T = token_values("hits", batch);
  evaluate(batch, max_seqlen, loss_T, hits_T);
  return {.loss_sum = ops::sum(stream_, loss_T), .hits = ops::sum(stream_, hits_T)};
}

std::vector<float> InferenceModel::losses(const PackedBatch& batch, int64_t max_seqlen) {
  const Buffer loss_T = token_values("loss", batch);
  evaluate(batch, max_seqlen, loss_T);
  std::vector<float> losses(batch.tokens.size());
  ops::run(stream_, ops::CopyToHost{.host = losses.data(), .x = loss_T});
  return losses;
}

InferenceModel::Document InferenceModel::document(const std::vector<int32_t>& tokens) {
  std::vector<int32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), 0);
  const auto length = static_cast<int64_t>(tokens.size());
  Document document{.tokens_T = upload("tokens", tokens),
                    .positions_T = upload("positions", positions),
                    .cu_seqlens = upload("cu_seqlens", {0, static_cast<int32_t>(length)}),
                    .batch = {}};
  document.batch = {.tokens_T = document.tokens_T,
                    .targets_T = {},
                    .sequences = {.cu_seqlens = document.cu_seqlens,
                                  .positions_T = document.positions_T,
                                  .count = 1,
                                  .max_seqlen = length}};
  return document;
}

std::vector<float> InferenceModel::logits(const std::vector<int32_t>& tokens) {
  const Document from = document(tokens);
  const int64_t vocab = model_.config().vocab;
  const Buffer logits_TV = memory_.allocate(MemoryClass::kLogits, "logits", DType::kF32,
                                            {static_cast<int64_t>(tokens.size()), vocab});
  model_.logits(stream_, params_, from.batch, logits_TV);
  std::vector<float> logits(tokens.size() * static_cast<size_t>(vocab));
  ops::run(stream_, ops::CopyToHost{.host = logits.data(), .x = logits_TV});
  return logits;
}

void InferenceModel::attention_maps(const std::vector<int32_t>& tokens, const MapVisit& visit) {
  const Document from = document(tokens);
  sbtrain::attention_maps(stream_, model_, params_, from.batch, visit);
}

AttentionMap InferenceModel::attention_map(const std::vector<int32_t>& tokens, int64_t layer,
                                           int64_t head) {
  const Document from = document(tokens);
  AttentionMap found;
  sbtrain::attention_maps(
      stream_, model_, params_, from.batch,
      [&](int64_t, int64_t, const AttentionMap& map) { found = map; },
      [&](int64_t l, int64_t h) { return l == layer && h == head; });
  return found;
}

MemoryReport plan_evaluation(const ModelConfig& config, Backend target, int64_t tokens,
                             int64_t max_seqlen) {
  return planned(config, target, [&](Stream& s, const Transformer& model, ShardedParams& params) {
    const Buffer tokens_T = input(s, "tokens", DType::kI32, tokens);
    const Buffer targets_T = input(s, "targets", DType::kI32, tokens);
    const Buffer positions_T = input(s, "positions", DType::kI32, tokens);
    const Buffer cu_seqlens = input(s, "cu_seqlens", DType::kI32, 2);
    const Buffer loss_T = input(s, "loss", DType::kF32, tokens);
    model.evaluate(s, params,
                   {.tokens_T = tokens_T,
                    .targets_T = targets_T,
                    .sequences = {.cu_seqlens = cu_seqlens,
                                  .positions_T = positions_T,
                                  .count = 1,
                                  .max_seqlen = max_seqlen}},
                   loss_T);
  });
}

MemoryReport plan_generation(const ModelConfig& config, Backend target, int64_t prompt,
                             int64_t max_tokens, const KeyDropping& dropping) {
  return planned(config, target, [&](Stream& s, const Transformer& model, ShardedParams& params) {
    DecodeBatch batch(model, params, s, /*slots=*/1, prompt + max_tokens, {.dropping = dropping});
    batch.start(std::vector<int32_t>(static_cast<size_t>(prompt)));
    if (max_tokens > 0) batch.step(std::array{0});
  });
}

MemoryReport plan_serving(const ModelConfig& config, Backend target, int64_t slots,
                          int64_t capacity, bool prompts_in_parts, const KeyDropping& dropping) {
  return planned(config, target, [&](Stream& s, const Transformer& model, ShardedParams& params) {
    DecodeBatch batch(model, params, s, slots, capacity, {.dropping = dropping});
    const auto see = [](int64_t, int64_t, std::span<const float>) {};
    const std::vector<int32_t> longest(static_cast<size_t>(capacity));
    if (prompts_in_parts) {
      batch.begin(longest, see);
      for (int64_t tokens = 0; !batch.advance(tokens);) tokens = capacity;
    } else {
      batch.start(longest, see);
    }
    batch.stop(0);
    for (int64_t slot = 0; slot < slots; ++slot) batch.start(std::array{0});
    batch.step(std::vector<int32_t>(static_cast<size_t>(slots)));
  });
}

}  // namespace sbtrain
