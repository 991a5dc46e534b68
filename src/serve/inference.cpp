#include "serve/inference.h"

#include "checkpoint/model_state.h"
#include "ops/ops.h"

namespace sbtrain {

InferenceModel::InferenceModel(const ModelConfig& config, const CheckpointReader& checkpoint,
                               Backend backend)
    : memory_(backend),
      stream_(memory_),
      model_(config),
      communicator_(make_single_process()),
      params_(model_.registry(), stream_, *communicator_, /*with_training=*/false) {
  load_params(checkpoint, params_, /*with_moments=*/false);
}

BatchScore InferenceModel::score(const PackedBatch& batch, int64_t max_seqlen) {
  const auto tokens = static_cast<int64_t>(batch.tokens.size());
  const auto upload = [&](const char* name, const std::vector<int32_t>& values) {
    Buffer buffer = memory_.allocate(MemoryClass::kInputs, name, DType::kI32,
                                     {static_cast<int64_t>(values.size())});
    ops::copy_from_host(stream_, buffer, values.data());
    return buffer;
  };
  const Buffer tokens_T = upload("tokens", batch.tokens);
  const Buffer targets_T = upload("targets", batch.targets);
  const Buffer positions_T = upload("positions", batch.positions);
  const Buffer cu_seqlens = upload("cu_seqlens", batch.cu_seqlens);
  const Buffer loss_T = memory_.allocate(MemoryClass::kInputs, "loss", DType::kF32, {tokens});
  const Buffer hits_T = memory_.allocate(MemoryClass::kInputs, "hits", DType::kF32, {tokens});
  model_.evaluate(stream_, params_,
                  {.tokens_T = tokens_T,
                   .targets_T = targets_T,
                   .sequences = {.cu_seqlens = cu_seqlens,
                                 .positions_T = positions_T,
                                 .count = static_cast<int64_t>(batch.cu_seqlens.size()) - 1,
                                 .max_seqlen = max_seqlen}},
                  loss_T, hits_T);
  return {.loss_sum = ops::sum(stream_, loss_T), .hits = ops::sum(stream_, hits_T)};
}

}  // namespace sbtrain
