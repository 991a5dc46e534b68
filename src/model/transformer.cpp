#include "model/transformer.h"

#include <algorithm>
#include <optional>

#include "core/error.h"
#include "layers/activations.h"
#include "ops/embedding.h"
#include "ops/loss.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

constexpr const char* kEmbedding = "embed_tokens.weight";
constexpr const char* kPositions = "embed_positions.weight";
constexpr const char* kFinalNorm = "model.norm";
constexpr const char* kHead = "lm_head.weight";

// The weights of a block, or its gradients, together with those that layers share.
class BlockWeights {
 public:
  BlockWeights(const Weights& own, const Weights* shared) : own_(own) {
    if (shared == nullptr) return;
    all_ = own;
    all_->add(*shared);
  }
  operator const Weights&() const { return all_ ? *all_ : own_; }  // NOLINT: passed as weights

 private:
  const Weights& own_;
  std::optional<Weights> all_;
};

// Of embedding, head and learned positions.
Init table_init(const ModelConfig& config) {
  return Init::normal(config.embedding_init_std > 0 ? config.embedding_init_std : config.init_std);
}

// The parameters that layers share, from all blocks, each name once.
std::vector<TensorSpec> shared_parameters(const std::vector<Block>& blocks) {
  std::vector<TensorSpec> specs;
  for (const Block& block : blocks) {
    for (TensorSpec& spec : block.attention().shared_parameters()) {
      const auto same_name = [&](const TensorSpec& other) { return other.name == spec.name; };
      const auto found = std::find_if(specs.begin(), specs.end(), same_name);
      if (found == specs.end()) {
        specs.push_back(std::move(spec));
      } else {
        require(found->shape == spec.shape, "layers share '{}' with different shapes", spec.name);
      }
    }
  }
  return specs;
}

}  // namespace

Transformer::Transformer(const ModelConfig& config, Recompute recompute, int world)
    : config_(config),
      registry_(world),
      final_norm_(norm_spec(config, kFinalNorm)),
      head_({.parts = {{config.tied ? kEmbedding : kHead, config.vocab}},
             .cols = config.width,
             .init = table_init(config),
             .alpha = static_cast<float>(config.logits_multiplier),
             .role = ParamRole::kTable}) {
  require(!config.attention.empty(), "the model has no attention configured");
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    blocks_.emplace_back(config, config.attention[layer % config.attention.size()], recompute);
  }
  const std::vector<int64_t> table = {config.vocab, config.width};
  const Init init = table_init(config);
  std::vector<TensorSpec> embedding = {
      {.name = kEmbedding, .shape = table, .storage = {}, .init = init, .decay = true}};
  embedding.front().role = ParamRole::kTable;
  embedding.front().one_product = config.tied;  // the loss forms it, and the tokens' rows are added
  if (has_positions()) {
    embedding.push_back({.name = kPositions,
                         .shape = {config.max_positions, config.width},
                         .storage = {},
                         .init = init,
                         .decay = true,
                         .role = ParamRole::kTable});
  }
  registry_.add_unit("model.", embedding);
  const auto lr_factor = static_cast<float>(config.matrix_lr_factor);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    std::vector<TensorSpec> specs = blocks_[layer].parameters();
    for (TensorSpec& spec : specs) {
      if (spec.role == ParamRole::kLinear) spec.lr_factor = lr_factor;
    }
    registry_.add_unit(fmt::format("model.layers.{}.", layer), specs);
  }
  std::vector<TensorSpec> head;
  final_norm_.add_parameters(head);
  if (!config.tied) head_.add_parameters(head);
  // Every layer adds to the gradients of what layers share.
  std::vector<TensorSpec> shared = shared_parameters(blocks_);
  for (TensorSpec& spec : shared) spec.one_product = false;
  registry_.add_unit("", head);
  if (!shared.empty()) registry_.add_unit("model.shared.", shared);
}

void Transformer::gather_shared(ParamAccess& params) const {
  if (has_shared()) params.gather(shared_unit());
}
void Transformer::release_shared(ParamAccess& params) const {
  if (has_shared()) params.release(shared_unit());
}
const Weights* Transformer::shared_weights(ParamAccess& params) const {
  return has_shared() ? &params.get(shared_unit()) : nullptr;
}

// Starts fetching what is used after block `layer`, so that it arrives while that block computes.
void Transformer::gather_after(ParamAccess& params, int64_t layer) const {
  params.gather(block_unit(layer + 1));  // after the last block: the head
  if (layer + 1 == config_.layers && config_.tied) params.gather(head_table());
}
void Transformer::gather_head(ParamAccess& params) const {
  params.gather(head_unit());
  if (config_.tied) params.gather(head_table());
}
void Transformer::release_head(ParamAccess& params) const {
  if (config_.tied) params.release(head_table());
  params.release(head_unit());
}

void Transformer::check_length(int64_t tokens) const {
  if (!has_positions() || tokens <= config_.max_positions) return;
  fail(ExitCode::kConfig, "{} tokens are more than the model's {} learned positions", tokens,
       config_.max_positions);
}

void Transformer::embed(Stream& s, ParamAccess& params, Tensor x_TD, Tensor tokens_T,
                        Tensor positions_T) const {
  const Weights& w = params.get(embedding_unit());
  ops::run(s, ops::Embedding{.y_TD = x_TD,
                             .tokens_T = tokens_T,
                             .w_VD = w.at(kEmbedding),
                             .scale = static_cast<float>(config_.embedding_multiplier)});
  if (has_positions()) {
    const Buffer positions_TD = activation(s, "positions", x_TD.rows(), config_.width);
    ops::run(s, ops::Embedding{.y_TD = positions_TD,
                               .tokens_T = positions_T,
                               .w_VD = w.at(kPositions),
                               .scale = 1.0f});
    ops::run(s, ops::Add{.y = x_TD, .x = positions_TD});
  }
  params.release(embedding_unit());
}

Buffer Transformer::embedding_buffer(Stream& s, int64_t tokens) const {
  return activation(s, "embedding", tokens, config_.width);
}

void Transformer::enter(Stream& s, ParamAccess& params, const PassInput& input, Tensor x_TD,
                        int64_t block) const {
  if (block == 0) params.gather(embedding_unit());
  params.gather(block_unit(block));
  gather_shared(params);
  if (block == 0) embed(s, params, x_TD, input.tokens_T, input.positions_T);
}

template <typename Run>
void Transformer::for_each_block(Stream& s, ParamAccess& params, Buffer& x_TD, BlockRange blocks,
                                 bool keeps_last, const Run& run) const {
  const int64_t T = x_TD.tensor().rows();
  for (int64_t l = blocks.begin; l < blocks.end; ++l) {
    if (l + 1 < blocks.end || blocks.end == config_.layers) gather_after(params, l);
    Buffer y_TD = activation(s, "block", T, config_.width);
    const BlockWeights w(params.get(block_unit(l)), shared_weights(params));
    run(l, y_TD.tensor(), x_TD, w);
    if (!keeps_last || l + 1 < blocks.end) params.release(block_unit(l));
    x_TD = std::move(y_TD);
  }
}

void Transformer::run_blocks(Stream& s, ParamAccess& params, const PassInput& input, Buffer& x_TD,
                             BlockRange blocks, const RunBlock& run) const {
  enter(s, params, input, x_TD, blocks.begin);
  for_each_block(s, params, x_TD, blocks, /*keeps_last=*/false, run);
  release_shared(params);
}

void Transformer::forward(Stream& s, ParamAccess& params, const BatchTensors& batch, Buffer& x_TD,
                          BlockRange blocks, const VisitBlock& visit) const {
  check_length(batch.sequences.max_seqlen);
  const auto run = [&](int64_t l, const Tensor& y_TD, const Buffer& x, const Weights& w) {
    BlockSaved saved;
    blocks_[l].forward(s, y_TD, x, w, saved, batch.sequences);
    if (visit) visit(l, w, saved.attention);
  };
  run_blocks(s, params, batch.input(), x_TD, blocks, run);
}

void Transformer::forward_backward(Stream& s, ParamAccess& params, const BatchTensors& batch,
                                   Tensor loss_T, float loss_weight, float z_loss,
                                   ActivationOffload* offload) const {
  const int64_t layers = config_.layers;
  check_length(batch.sequences.max_seqlen);
  BlockInputs inputs(s, layers, offload);
  std::vector<BlockSaved> saved(layers);
  Buffer x_TD = embedding_buffer(s, batch.tokens());
  enter(s, params, batch.input(), x_TD, 0);
  // The backward pass begins with the last block.
  for_each_block(s, params, x_TD, all_blocks(), /*keeps_last=*/true,
                 [&](int64_t l, const Tensor& y_TD, Buffer& x, const Weights& w) {
                   const Tensor input_TD = inputs.begin_forward(l, std::move(x));
                   blocks_[l].forward(s, y_TD, input_TD, w, saved[l], batch.sequences);
                   inputs.end_forward(l);
                 });

  const Buffer dx_TD = activation(s, "dx", batch.tokens(), config_.width);
  Buffer dx_amax_1;
  if (std::any_of(blocks_.begin(), blocks_.end(),
                  [&](const Block& block) { return block.takes_amax(s, batch.tokens()); })) {
    dx_amax_1 = s.allocate(MemoryClass::kActivations, "dx amax", DType::kF32, {1});
  }
  const Gradient dx{.x_TD = dx_TD, .amax_1 = dx_amax_1};
  loss_and_gradient(s, params, dx, x_TD, batch, loss_T, loss_weight, z_loss);
  x_TD.release();
  for (int64_t l = layers - 1; l >= 0; --l) {
    if (l > 0) params.gather(block_unit(l - 1));
    const BlockWeights w(params.get(block_unit(l)), shared_weights(params));
    const BlockWeights dw(params.gradients(block_unit(l)),
                          has_shared() ? &params.gradients(shared_unit()) : nullptr);
    const Tensor input_TD = inputs.begin_backward(l);
    blocks_[l].backward(s, dx, input_TD, w, dw, saved[l], batch.sequences);
    params.release(block_unit(l));
    params.reduce(block_unit(l));
    inputs.end_backward(l);
  }
  release_shared(params);
  if (has_shared()) params.reduce(shared_unit());
  embed_backward(s, params, dx_TD, batch);
}

Buffer Transformer::rows_with_target(Stream& s, const BatchTensors& batch, Tensor x_TD) const {
  Buffer x_SD = activation(s, "with target", batch.rows_S.rows(), config_.width);
  ops::run(s, ops::Embedding{.y_TD = x_SD, .tokens_T = batch.rows_S, .w_VD = x_TD});
  return x_SD;
}

void Transformer::loss_and_gradient(Stream& s, ParamAccess& params, const Gradient& dx, Tensor x_TD,
                                    const BatchTensors& batch, Tensor loss_T, float loss_weight,
                                    float z_loss) const {
  const bool some = batch.rows_S.defined();
  Buffer some_SD, dsome_SD;
  if (some) {
    some_SD = rows_with_target(s, batch, x_TD);
    // One row more, of zeros, for the tokens without a target.
    dsome_SD = activation(s, "dwith target", batch.rows_S.rows() + 1, config_.width);
  }
  const Tensor x_SD = some ? some_SD.tensor() : x_TD;
  const int64_t S = x_SD.rows();
  Buffer norm_SD = activation(s, "final_norm", S, config_.width);
  Buffer dnorm_SD = activation(s, "dfinal_norm", S, config_.width);
  const Weights& head = params.get(head_unit());
  final_norm_.forward(s, norm_SD, x_SD, head);
  const bool fresh = params.gradients(head_table()).fresh(config_.tied ? kEmbedding : kHead);
  ops::run(s, ops::CrossEntropy{.loss_T = loss_T,
                                .dx_TD = dnorm_SD,
                                .dw_VD = head_.weight(params.gradients(head_table())),
                                .x_TD = norm_SD,
                                .w_VD = head_.weight(params.get(head_table())),
                                .targets_T = batch.targets_T,
                                .loss_weight = loss_weight,
                                .logit_scale = head_.alpha(),
                                .z_loss = z_loss,
                                .accumulate_dw = !fresh});
  const Tensor dx_SD = some ? dsome_SD.tensor() : dx.x_TD;
  ops::run(s, ops::Fill{.x = dx_SD, .value = 0.0f});
  final_norm_.backward(s, dx_SD.row_range(0, S), params.gradients(head_unit()), dnorm_SD, x_SD,
                       head, dx.amax_1);
  if (some) {
    ops::run(s, ops::Embedding{.y_TD = dx.x_TD, .tokens_T = batch.slots_T, .w_VD = dx_SD});
  }
  release_head(params);
  params.reduce(head_unit());
}

void Transformer::embed_backward(Stream& s, ParamAccess& params, Tensor dx_TD,
                                 const BatchTensors& batch) const {
  const Weights& dw = params.gradients(embedding_unit());
  ops::run(s, ops::EmbeddingBackward{.dw_VD = dw.at(kEmbedding),
                                     .dy_TD = dx_TD,
                                     .tokens_T = batch.tokens_T,
                                     .scale = static_cast<float>(config_.embedding_multiplier)});
  if (has_positions()) {
    ops::run(s, ops::EmbeddingBackward{.dw_VD = dw.at(kPositions),
                                       .dy_TD = dx_TD,
                                       .tokens_T = batch.sequences.positions_T,
                                       .scale = 1.0f});
  }
  params.reduce(embedding_unit());
}

void Transformer::evaluate(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor loss_T,
                           Tensor hits_T) const {
  Buffer x_TD = embedding_buffer(s, batch.tokens());
  forward(s, params, batch, x_TD, all_blocks());
  if (batch.rows_S.defined()) x_TD = rows_with_target(s, batch, x_TD);
  const Buffer norm_TD = final_norm(s, params, x_TD);
  ops::run(s, ops::CrossEntropy{.loss_T = loss_T,
                                .hits_T = hits_T,
                                .x_TD = norm_TD,
                                .w_VD = head_.weight(params.get(head_table())),
                                .targets_T = batch.targets_T,
                                .logit_scale = head_.alpha()});
  release_head(params);
}

Buffer Transformer::final_norm(Stream& s, ParamAccess& params, Tensor x_TD) const {
  Buffer norm_TD = activation(s, "final_norm", x_TD.rows(), config_.width);
  final_norm_.forward(s, norm_TD, x_TD, params.get(head_unit()));
  return norm_TD;
}

void Transformer::logits_of(Stream& s, ParamAccess& params, Tensor logits_TV,
                            Tensor norm_TD) const {
  head_.forward(s, logits_TV, norm_TD, params.get(head_table()));
}

void Transformer::project(Stream& s, ParamAccess& params, Tensor x_TD, Tensor logits_TV) const {
  const Buffer norm_TD = final_norm(s, params, x_TD);
  logits_of(s, params, logits_TV, norm_TD);
  release_head(params);
}

void Transformer::project_decoded(Stream& s, ParamAccess& params, Tensor x_BD,
                                  Tensor logits_BV) const {
  if (!final_norm_.fuses()) return project(s, params, x_BD, logits_BV);
  head_.decode(s, logits_BV, x_BD, params.get(head_table()),
               {.norm = final_norm_.fused(params.get(head_unit()))});
  release_head(params);
}

void Transformer::logits(Stream& s, ParamAccess& params, const BatchTensors& batch,
                         Tensor logits_TV) const {
  Buffer x_TD = embedding_buffer(s, batch.tokens());
  forward(s, params, batch, x_TD, all_blocks());
  project(s, params, x_TD, logits_TV);
}

double Transformer::flops_per_token(double keys, double with_target) const {
  double attention = 0;
  for (const Block& block : blocks_) attention += block.attention().flops_per_token(keys);
  const auto logits = static_cast<double>(config_.vocab * config_.width);
  return 6 * (static_cast<double>(registry_.count()) - (1 - with_target) * logits) + 3 * attention;
}

}  // namespace sbtrain
