// A trained model, ready to run: the weights of a checkpoint without gradients and moments.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "attention/kept_keys.h"
#include "checkpoint/checkpoint.h"
#include "core/stream.h"
#include "data/batch.h"
#include "model/inference/maps.h"
#include "model/model_config.h"
#include "model/transformer.h"
#include "parallel/mesh.h"
#include "parallel/sharded_params.h"

namespace sbtrain {

// The memory that the losses of `tokens` tokens at once take on `target`, in documents of up to
// max_seqlen tokens, weights included. Throws ExitCode::kConfig if the model does not support
// documents of that length.
MemoryReport plan_evaluation(const ModelConfig& config, Backend target, int64_t tokens,
                             int64_t max_seqlen);

// The same for a prompt and the tokens that may follow it. Where keys are dropped, for the share of
// them that the cache may keep.
MemoryReport plan_generation(const ModelConfig& config, Backend target, int64_t prompt,
                             int64_t max_tokens, const KeyDropping& dropping = {});

// The same for `slots` sequences that are continued together, of at most `capacity` tokens each,
// prompts included (serve/decode_batch.h). A prompt that runs in parts keeps more.
MemoryReport plan_serving(const ModelConfig& config, Backend target, int64_t slots,
                          int64_t capacity, bool prompts_in_parts,
                          const KeyDropping& dropping = {});

// Throws ExitCode::kOutOfMemory, with the advice, if the device has less free than `plan` needs.
void require_room(Backend backend, const MemoryReport& plan,
                  const std::string& advice = "Ask for fewer tokens at once.");

class InferenceModel {
 public:
  // `config` is the model part of the checkpoint's configuration. Calls require_room before
  // anything is allocated. Throws ExitCode::kNoCheckpoint for tensors that are missing or of
  // another shape.
  InferenceModel(const ModelConfig& config, const CheckpointReader& checkpoint, Backend backend,
                 const MemoryReport& plan);

  const Transformer& model() const { return model_; }
  ShardedParams& params() { return params_; }
  Stream& stream() { return stream_; }

  // Loss and hits of the batch's valid targets. Batches may differ in size. `max_seqlen` bounds the
  // documents' lengths.
  BatchScore score(const PackedBatch& batch, int64_t max_seqlen);
  // The loss (nats) of each token of the batch, 0 for a token without a target.
  std::vector<float> losses(const PackedBatch& batch, int64_t max_seqlen);
  // The logits [T, V] of `tokens`, one document.
  std::vector<float> logits(const std::vector<int32_t>& tokens);
  // Every head's attention over `tokens`, one document (model/inference/maps.h).
  void attention_maps(const std::vector<int32_t>& tokens, const MapVisit& visit);
  // The same of one head; without tokens if its module has no map.
  AttentionMap attention_map(const std::vector<int32_t>& tokens, int64_t layer, int64_t head);
  // What each head of each layer reads of the keys (model/inference/maps.h).
  std::vector<std::vector<KeysRead>> keys_read_by_head(const PackedBatch& batch,
                                                       int64_t max_seqlen);

 private:
  // A batch, and the buffers that it lies in.
  struct Uploaded {
    Buffer tokens_T, targets_T, positions_T, cu_seqlens;
    BatchTensors batch;
  };
  Uploaded uploaded(const PackedBatch& batch, int64_t max_seqlen);
  // `tokens` as one document, in buffers that `batch` keeps.
  struct Document {
    Buffer tokens_T, positions_T, cu_seqlens;
    BatchTensors batch;
  };
  Document document(const std::vector<int32_t>& tokens);
  Buffer upload(const char* name, const std::vector<int32_t>& values);
  void evaluate(const PackedBatch& batch, int64_t max_seqlen, Tensor loss_T, Tensor hits_T = {});
  Buffer token_values(const char* name, const PackedBatch& batch);
  Memory memory_;
  Stream stream_;
  Transformer model_;
  std::unique_ptr<Communicator> communicator_;
  Mesh mesh_;
  ShardedParams params_;
};

}  // namespace sbtrain
