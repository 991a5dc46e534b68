// What a model is made from.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention_config.h"
#include "core/enum_names.h"
#include "layers/mlp.h"
#include "layers/norm.h"

namespace sbtrain {

enum class PositionEmbedding : uint8_t { kNone, kLearned };
template <>
inline constexpr auto kNames<PositionEmbedding> = enum_names<PositionEmbedding>(
    {{PositionEmbedding::kNone, "none"}, {PositionEmbedding::kLearned, "learned"}});

// Which end of a sublayer (attention or MLP) its norm is at.
enum class NormPosition : uint8_t {
  kInput,   // x + f(norm(x)): Llama
  kOutput,  // x + norm(f(x)): OLMo 2
};
template <>
inline constexpr auto kNames<NormPosition> =
    enum_names<NormPosition>({{NormPosition::kInput, "input"}, {NormPosition::kOutput, "output"}});

// The numbers that its attention modules read are those of its base.
struct ModelConfig : AttentionShape {
  int64_t layers = 4;
  int64_t inner = 344;   // F
  int64_t vocab = 4096;  // V
  bool tied = true;      // the head shares the embedding's weights
  NormKind norm = NormKind::kRmsNorm;
  NormPosition norm_position = NormPosition::kInput;
  MlpKind mlp = MlpKind::kSwiGlu;
  bool parallel_residual = false;  // the MLP reads what attention reads
  PositionEmbedding position = PositionEmbedding::kNone;
  int64_t max_positions = 0;  // learned: the longest document
  // muP-like multipliers of the Power paper (arXiv 2408.13359); 1 is plain Llama.
  double embedding_multiplier = 1.0;
  double residual_multiplier = 1.0;
  double logits_multiplier = 1.0;
  double matrix_lr_factor = 1.0;    // of the learning rate of matrices in blocks
  double embedding_init_std = 0.0;  // of embedding, head and learned positions; 0: init_std
  std::vector<AttentionConfig> attention = {AttentionConfig{}};  // repeated over the layers
  bool operator==(const ModelConfig&) const = default;
};

// What the backward pass computes again, so that the forward pass need not keep it.
enum class Recompute : uint8_t {
  kNone,
  kSelective,  // norms and activations
  kFull,       // everything but the blocks' inputs
};
template <>
inline constexpr auto kNames<Recompute> = enum_names<Recompute>(
    {{Recompute::kNone, "none"}, {Recompute::kSelective, "selective"}, {Recompute::kFull, "full"}});

}  // namespace sbtrain
