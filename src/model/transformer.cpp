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
             .init = Init::normal(config.init_std),
             .alpha = static_cast<float>(config.logits_multiplier)}) {
  require(!config.attention.empty(), "the model has no attention configured");
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    blocks_.emplace_back(config, config.attention[layer % config.attention.size()], recompute);
  }
  const std::vector<int64_t> table = {config.vocab, config.width};
  const Init init = Init::normal(config.init_std);
  std::vector<TensorSpec> embedding = {
      {.name = kEmbedding, .shape = table, .storage = {}, .init = init, .decay = true}};
  embedding.front().one_product = config.tied;  // the loss forms it, and the tokens' rows are added
  if (has_positions()) {
    embedding.push_back({.name = kPositions,
                         .shape = {config.max_positions, config.width},
                         .storage = {},
                         .init = init,
                         .decay = true});
  }
  registry_.add_unit("model.", embedding);
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    registry_.add_unit(fmt::format("model.layers.{}.", layer), blocks_[layer].parameters());
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

void Transformer::forward_backward(Stream& s, ParamAccess& params, const BatchTensors& batch,
                                   Tensor loss_T, float loss_weight, float z_loss) const {
  const int64_t T = batch.tokens();
  const int64_t layers = config_.layers;
  check_length(batch.sequences.max_seqlen);
  std::vector<Buffer> x_TD(layers + 1);  // the input of each block, and the last one's output
  std::vector<BlockSaved> saved(layers);
  x_TD[0] = activation(s, "embedding", T, config_.width);
  params.gather(embedding_unit());
  params.gather(block_unit(0));
  gather_shared(params);
  embed(s, params, x_TD[0], batch.tokens_T, batch.sequences.positions_T);
  for (int64_t l = 0; l < layers; ++l) {
    gather_after(params, l);
    x_TD[l + 1] = activation(s, "block", T, config_.width);
    const BlockWeights w(params.get(block_unit(l)), shared_weights(params));
    blocks_[l].forward(s, x_TD[l + 1], x_TD[l], w, saved[l], batch.sequences);
    if (l + 1 < layers) params.release(block_unit(l));  // the backward pass begins with the last
  }

  Buffer dx_TD = activation(s, "dx", T, config_.width);
  {
    Buffer norm_TD = activation(s, "final_norm", T, config_.width);
    Buffer dnorm_TD = activation(s, "dfinal_norm", T, config_.width);
    const Weights& head = params.get(head_unit());
    final_norm_.forward(s, norm_TD, x_TD[layers], head);
    const bool fresh = params.gradients(head_table()).fresh(config_.tied ? kEmbedding : kHead);
    ops::run(s, ops::CrossEntropy{.loss_T = loss_T,
                                  .dx_TD = dnorm_TD,
                                  .dw_VD = head_.weight(params.gradients(head_table())),
                                  .x_TD = norm_TD,
                                  .w_VD = head_.weight(params.get(head_table())),
                                  .targets_T = batch.targets_T,
                                  .loss_weight = loss_weight,
                                  .logit_scale = head_.alpha(),
                                  .z_loss = z_loss,
                                  .accumulate_dw = !fresh});
    ops::run(s, ops::Fill{.x = dx_TD, .value = 0.0f});
    final_norm_.backward(s, dx_TD, params.gradients(head_unit()), dnorm_TD, x_TD[layers], head);
    release_head(params);
    params.reduce(head_unit());
    x_TD[layers].release();
  }

  for (int64_t l = layers - 1; l >= 0; --l) {
    if (l > 0) params.gather(block_unit(l - 1));
    const BlockWeights w(params.get(block_unit(l)), shared_weights(params));
    const BlockWeights dw(params.gradients(block_unit(l)),
                          has_shared() ? &params.gradients(shared_unit()) : nullptr);
    blocks_[l].backward(s, dx_TD, x_TD[l], w, dw, saved[l], batch.sequences);
    params.release(block_unit(l));
    params.reduce(block_unit(l));
    x_TD[l].release();
  }
  release_shared(params);
  if (has_shared()) params.reduce(shared_unit());
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

template <typename Visit>
void Transformer::run_blocks(Stream& s, ParamAccess& params, const BatchTensors& batch,
                             Buffer& x_TD, Visit visit) const {
  run_blocks(s, params, batch, x_TD, 0, config_.layers, visit);
}

template <typename Visit>
void Transformer::run_blocks(Stream& s, ParamAccess& params, const BatchTensors& batch,
                             Buffer& x_TD, int64_t begin, int64_t end, Visit visit) const {
  const int64_t T = batch.tokens();
  check_length(batch.sequences.max_seqlen);
  if (begin == 0) params.gather(embedding_unit());
  params.gather(block_unit(begin));
  gather_shared(params);
  if (begin == 0) embed(s, params, x_TD, batch.tokens_T, batch.sequences.positions_T);
  for (int64_t l = begin; l < end; ++l) {
    if (l + 1 < end || end == config_.layers) gather_after(params, l);
    Buffer y_TD = activation(s, "block", T, config_.width);
    BlockSaved saved;
    const BlockWeights w(params.get(block_unit(l)), shared_weights(params));
    blocks_[l].forward(s, y_TD, x_TD, w, saved, batch.sequences);
    visit(l, w, saved.attention);
    params.release(block_unit(l));
    x_TD = std::move(y_TD);
  }
  release_shared(params);
}

void Transformer::evaluate(Stream& s, ParamAccess& params, const BatchTensors& batch, Tensor loss_T,
                           Tensor hits_T) const {
  Buffer x_TD = activation(s, "embedding", batch.tokens(), config_.width);
  run_blocks(s, params, batch, x_TD,
             [](int64_t, const Weights&, const std::unique_ptr<AttentionSaved>&) {});
  Buffer norm_TD = activation(s, "final_norm", batch.tokens(), config_.width);
  final_norm_.forward(s, norm_TD, x_TD, params.get(head_unit()));
  ops::run(s, ops::CrossEntropy{.loss_T = loss_T,
                                .hits_T = hits_T,
                                .x_TD = norm_TD,
                                .w_VD = head_.weight(params.get(head_table())),
                                .targets_T = batch.targets_T,
                                .logit_scale = head_.alpha()});
  release_head(params);
}

// x_TD is the blocks' output. The head must have been gathered and is released here.
void Transformer::project(Stream& s, ParamAccess& params, Tensor x_TD, Tensor logits_TV) const {
  Buffer norm_TD = activation(s, "final_norm", x_TD.rows(), config_.width);
  final_norm_.forward(s, norm_TD, x_TD, params.get(head_unit()));
  head_.forward(s, logits_TV, norm_TD, params.get(head_table()));
  release_head(params);
}

void Transformer::logits(Stream& s, ParamAccess& params, const BatchTensors& batch,
                         Tensor logits_TV) const {
  Buffer x_TD = activation(s, "embedding", batch.tokens(), config_.width);
  run_blocks(s, params, batch, x_TD,
             [](int64_t, const Weights&, const std::unique_ptr<AttentionSaved>&) {});
  project(s, params, x_TD, logits_TV);
}

DecodeCache Transformer::allocate_cache(Memory& memory, int64_t sequences, int64_t capacity) const {
  return DecodeCache(memory, blocks_, sequences, capacity);
}

void Transformer::prefill_blocks(Stream& s, ParamAccess& params, const BatchTensors& batch,
                                 DecodeCache& cache, int64_t b, Buffer& x_TD) const {
  run_blocks(s, params, batch, x_TD,
             [&](int64_t l, const Weights&, const std::unique_ptr<AttentionSaved>& saved) {
               require(saved != nullptr, "prefill needs a model with Recompute::kNone");
               blocks_[l].attention().prefill(s, cache.layer(l), b, *saved);
             });
}

void Transformer::prefill(Stream& s, ParamAccess& params, const BatchTensors& batch,
                          DecodeCache& cache, int64_t b, Tensor logits_1V) const {
  Buffer x_TD = activation(s, "embedding", batch.tokens(), config_.width);
  prefill_blocks(s, params, batch, cache, b, x_TD);
  project(s, params, x_TD.tensor().row_range(batch.tokens() - 1, 1), logits_1V);
}

void Transformer::prefill(Stream& s, ParamAccess& params, const BatchTensors& batch,
                          DecodeCache& cache, int64_t b, Tensor logits_CV,
                          const LogitsVisit& visit) const {
  const int64_t T = batch.tokens();
  Buffer x_TD = activation(s, "embedding", T, config_.width);
  prefill_blocks(s, params, batch, cache, b, x_TD);
  Buffer norm_TD = activation(s, "final_norm", T, config_.width);
  final_norm_.forward(s, norm_TD, x_TD, params.get(head_unit()));
  const auto logits = [&](int64_t first, int64_t rows) {
    const Tensor logits_NV = logits_CV.row_range(0, rows);
    head_.forward(s, logits_NV, norm_TD.tensor().row_range(first, rows), params.get(head_table()));
    return logits_NV;
  };
  for (int64_t first = 0; first < T; first += logits_CV.rows()) {
    const int64_t rows = std::min(T - first, logits_CV.rows());
    visit(first, logits(first, rows));
  }
  logits(T - 1, 1);
  release_head(params);
}

bool Transformer::prefill_layers(Stream& s, ParamAccess& params, PartialPrefill& prompt,
                                 int64_t layers) const {
  const auto begin = static_cast<int64_t>(prompt.saved.size());
  const int64_t end = std::min(begin + layers, config_.layers);
  if (begin == 0) {
    prompt.x_TD = activation(s, "embedding", prompt.batch.tokens(), config_.width);
  }
  run_blocks(s, params, prompt.batch, prompt.x_TD, begin, end,
             [&](int64_t, const Weights&, std::unique_ptr<AttentionSaved>& saved) {
               require(saved != nullptr, "prefill needs a model with Recompute::kNone");
               prompt.saved.push_back(std::move(saved));
             });
  if (end < config_.layers) return false;
  release_head(params);
  return true;
}

bool Transformer::prefill_rows(Stream& s, ParamAccess& params, PartialPrefill& prompt, int64_t rows,
                               Tensor logits_CV, const LogitsVisit& visit) const {
  const int64_t end = std::min(prompt.row + rows, prompt.batch.tokens());
  while (prompt.row < end) {
    const int64_t n = std::min(end - prompt.row, logits_CV.rows());
    const Tensor logits_NV = logits_CV.row_range(0, n);
    gather_head(params);
    project(s, params, prompt.x_TD.tensor().row_range(prompt.row, n), logits_NV);
    visit(prompt.row, logits_NV);
    prompt.row += n;
  }
  return end == prompt.batch.tokens();
}

void Transformer::finish_prefill(Stream& s, ParamAccess& params, PartialPrefill& prompt,
                                 DecodeCache& cache, int64_t b, Tensor logits_1V) const {
  for (int64_t l = 0; l < config_.layers; ++l) {
    blocks_[l].attention().prefill(s, cache.layer(l), b, *prompt.saved.at(static_cast<size_t>(l)));
  }
  gather_head(params);
  project(s, params, prompt.x_TD.tensor().row_range(prompt.batch.tokens() - 1, 1), logits_1V);
}

void Transformer::decode(Stream& s, ParamAccess& params, Tensor tokens_B, DecodeCache& cache,
                         const DecodeStep& step, Tensor logits_BV) const {
  const int64_t B = tokens_B.rows();
  Buffer x_BD = activation(s, "embedding", B, config_.width);
  params.gather(embedding_unit());
  params.gather(block_unit(0));
  gather_shared(params);
  embed(s, params, x_BD, tokens_B, step.positions_B);
  for (int64_t l = 0; l < config_.layers; ++l) {
    gather_after(params, l);
    Buffer y_BD = activation(s, "block", B, config_.width);
    const BlockWeights w(params.get(block_unit(l)), shared_weights(params));
    blocks_[l].decode(s, y_BD, x_BD, w, cache.layer(l), step);
    params.release(block_unit(l));
    x_BD = std::move(y_BD);
  }
  release_shared(params);
  if (!final_norm_.fuses()) return project(s, params, x_BD, logits_BV);
  head_.decode(s, logits_BV, x_BD, params.get(head_table()),
               {.norm = final_norm_.fused(params.get(head_unit()))});
  release_head(params);
}

void Transformer::attention_maps(Stream& s, ParamAccess& params, const BatchTensors& batch,
                                 const MapVisit& visit, const MapWanted& wanted) const {
  require(batch.sequences.count == 1, "attention maps take one document, not {}",
          batch.sequences.count);
  Buffer x_TD = activation(s, "embedding", batch.tokens(), config_.width);
  run_blocks(s, params, batch, x_TD,
             [&](int64_t l, const Weights& w, const std::unique_ptr<AttentionSaved>& saved) {
               require(saved != nullptr, "attention maps need a model with Recompute::kNone");
               for (int64_t h = 0; h < config_.heads; ++h) {
                 if (wanted && !wanted(l, h)) continue;
                 const AttentionMap map =
                     blocks_[l].attention().map(s, w, *saved, batch.sequences, h);
                 if (map.tokens > 0) visit(l, h, map);
               }
             });
  release_head(params);
}

std::vector<KeysRead> Transformer::keys_read(Stream& s, ParamAccess& params,
                                             const BatchTensors& batch) const {
  Buffer x_TD = activation(s, "embedding", batch.tokens(), config_.width);
  std::vector<KeysRead> layers;
  run_blocks(s, params, batch, x_TD,
             [&](int64_t l, const Weights&, const std::unique_ptr<AttentionSaved>& saved) {
               require(saved != nullptr, "counting keys needs a model with Recompute::kNone");
               layers.push_back(blocks_[l].attention().keys_read(s, *saved, batch.sequences));
             });
  release_head(params);
  return layers;
}

double Transformer::flops_per_token(double keys) const {
  double attention = 0;
  for (const Block& block : blocks_) attention += block.attention().flops_per_token(keys);
  return 6 * static_cast<double>(registry_.count()) + 3 * attention;
}

}  // namespace sbtrain
