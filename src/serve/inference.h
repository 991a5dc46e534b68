// A trained model, ready to run: the weights of a checkpoint without gradients and moments.
#pragma once

#include <memory>

#include "checkpoint/checkpoint.h"
#include "config/config.h"
#include "core/stream.h"
#include "data/batch.h"
#include "model/llama.h"
#include "parallel/communicator.h"
#include "parallel/sharded_params.h"

namespace sbtrain {

class InferenceModel {
 public:
  // `config` is the model part of the checkpoint's configuration. Throws
  // ExitCode::kNoCheckpoint for tensors that are missing or of another shape.
  InferenceModel(const ModelConfig& config, const CheckpointReader& checkpoint, Backend backend);

  const Llama& model() const { return model_; }
  ShardedParams& params() { return params_; }
  Stream& stream() { return stream_; }

  // Loss and hits of the batch's valid targets. Batches may differ in size. `max_seqlen` bounds the
  // documents' lengths.
  BatchScore score(const PackedBatch& batch, int64_t max_seqlen);
  double loss_sum(const PackedBatch& batch, int64_t max_seqlen) {
    return score(batch, max_seqlen).loss_sum;
  }

 private:
  Memory memory_;
  Stream stream_;
  Llama model_;
  std::unique_ptr<Communicator> communicator_;
  ShardedParams params_;
};

}  // namespace sbtrain
