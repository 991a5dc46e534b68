#include "model/llama.h"

#include "core/error.h"
#include "ops/ops.h"

namespace sbtrain {
namespace {

Buffer residual_stream(Stream& s, std::string_view name, int64_t tokens, int64_t width) {
  return s.memory().allocate(MemoryClass::kActivations, name, s.memory().compute_dtype(),
                             {tokens, width});
}

constexpr const char* kEmbedding = "embed_tokens.weight";
constexpr const char* kFinalNorm = "model.norm.weight";
constexpr const char* kHead = "lm_head.weight";

}  // namespace

Llama::Llama(const ModelConfig& config, Recompute recompute, int world)
    : config_(config), registry_(world) {
  require(!config.attention.empty(), "the model has no attention configured");
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    blocks_.emplace_back(config, config.attention[layer % config.attention.size()], recompute);
  }
  const std::vector<int64_t> table = {config.vocab, config.width};
  const Init init = Init::normal(config.init_std);
  registry_.add_unit(
      "model.", {{.name = kEmbedding, .shape = table, .storage = {}, .init = init, .decay = true}});
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    registry_.add_unit(fmt::format("model.layers.{}.", layer), blocks_[layer].parameters());
  }
  std::vector<TensorSpec> head = {
      {.name = kFinalNorm, .shape = {config.width}, .storage = {}, .init = Init::constant(1)}};
  if (!config.tied) {
    head.push_back({.name = kHead, .shape = table, .storage = {}, .init = init, .decay = true});
  }
  registry_.add_unit("", head);
}

void Llama::embed(Stream& s, ParamAccess& params, Tensor x_TD, Tensor tokens_T) const {
  params.gather(embedding_unit());
  ops::embedding(s, x_TD, tokens_T, params.get(embedding_unit()).at(kEmbedding),
                 static_cast<float>(config_.embedding_multiplier));
  params.release(embedding_unit());
}

void Llama::forward_backward(Stream& s, ParamAccess& params, const BatchTensors& batch,
                             Tensor loss_T, float loss_weight, float z_loss) const {
  const int64_t T = batch.tokens();
  const int64_t layers = config_.layers;
  // The head's weights: its own, or the embedding's.
  const int head_table = config_.tied ? embedding_unit() : head_unit();
  const char* table_name = config_.tied ? kEmbedding : kHead;

  std::vector<Buffer> x_TD(layers + 1);  // the input of each block, and the last one's output
  std::vector<BlockSaved> saved(layers);
  x_TD[0] = residual_stream(s, "embedding", T, config_.width);
  params.gather(block_unit(0));
  embed(s, params, x_TD[0], batch.tokens_T);
  for (int64_t l = 0; l < layers; ++l) {
    params.gather(block_unit(l + 1));  // behind the last block: the head
    x_TD[l + 1] = residual_stream(s, "block", T, config_.width);
    blocks_[l].forward(s, x_TD[l + 1], x_TD[l], params.get(block_unit(l)), saved[l],
                       batch.sequences);
    params.release(block_unit(l));
  }

  Buffer dx_TD = residual_stream(s, "dx", T, config_.width);
  {
    if (config_.tied) params.gather(head_table);
    params.gather(block_unit(layers - 1));
    Buffer norm_TD = residual_stream(s, "final_norm", T, config_.width);
    Buffer dnorm_TD = residual_stream(s, "dfinal_norm", T, config_.width);
    const Tensor& norm_D = params.get(head_unit()).at(kFinalNorm);
    const float eps = static_cast<float>(config_.norm_eps);
    ops::rmsnorm(s, norm_TD, x_TD[layers], norm_D, eps);
    ops::linear_cross_entropy(s, {.loss_T = loss_T,
                                  .dx_TD = dnorm_TD,
                                  .dw_VD = params.gradients(head_table).at(table_name),
                                  .x_TD = norm_TD,
                                  .w_VD = params.get(head_table).at(table_name),
                                  .targets_T = batch.targets_T,
                                  .loss_weight = loss_weight,
                                  .logit_scale = static_cast<float>(config_.logits_multiplier),
                                  .z_loss = z_loss});
    ops::fill(s, dx_TD, 0.0f);
    ops::rmsnorm_backward(s, dx_TD, params.gradients(head_unit()).at(kFinalNorm), dnorm_TD,
                          x_TD[layers], norm_D, eps);
    if (config_.tied) params.release(head_table);
    params.release(head_unit());
    params.reduce(head_unit());
    x_TD[layers].release();
  }

  for (int64_t l = layers - 1; l >= 0; --l) {
    if (l > 0) params.gather(block_unit(l - 1));
    blocks_[l].backward(s, dx_TD, x_TD[l], params.get(block_unit(l)),
                        params.gradients(block_unit(l)), saved[l], batch.sequences);
    params.release(block_unit(l));
    params.reduce(block_unit(l));
    x_TD[l].release();
  }
  ops::embedding_backward(s, params.gradients(embedding_unit()).at(kEmbedding), dx_TD,
                          batch.tokens_T, static_cast<float>(config_.embedding_multiplier));
  params.reduce(embedding_unit());
}

template <typename Visit>
void Llama::run_blocks(Stream& s, ParamAccess& params, const BatchTensors& batch, Buffer& x_TD,
                       Visit visit) const {
  const int64_t T = batch.tokens();
  params.gather(block_unit(0));
  embed(s, params, x_TD, batch.tokens_T);
  for (int64_t l = 0; l < config_.layers; ++l) {
    params.gather(block_unit(l + 1));
    Buffer y_TD = residual_stream(s, "block", T, config_.width);
    BlockSaved saved;
    blocks_[l].forward(s, y_TD, x_TD, params.get(block_unit(l)), saved, batch.sequences);
    params.release(block_unit(l));
    visit(l, saved.attention.get());
    x_TD = std::move(y_TD);
  }
}

void Llama::evaluate(Stream& s, ParamAccess& params, const BatchTensors& batch,
                     Tensor loss_T) const {
  Buffer x_TD = residual_stream(s, "embedding", batch.tokens(), config_.width);
  run_blocks(s, params, batch, x_TD, [](int64_t, const AttentionSaved*) {});
  const int head_table = config_.tied ? embedding_unit() : head_unit();
  if (config_.tied) params.gather(head_table);
  Buffer norm_TD = residual_stream(s, "final_norm", batch.tokens(), config_.width);
  ops::rmsnorm(s, norm_TD, x_TD, params.get(head_unit()).at(kFinalNorm),
               static_cast<float>(config_.norm_eps));
  ops::linear_cross_entropy(s,
                            {.loss_T = loss_T,
                             .x_TD = norm_TD,
                             .w_VD = params.get(head_table).at(config_.tied ? kEmbedding : kHead),
                             .targets_T = batch.targets_T,
                             .logit_scale = static_cast<float>(config_.logits_multiplier)});
  if (config_.tied) params.release(head_table);
  params.release(head_unit());
}

// x_TD: the blocks' output; the head unit has been gathered, and is released here.
void Llama::project(Stream& s, ParamAccess& params, Tensor x_TD, Tensor logits_TV) const {
  const int head_table = config_.tied ? embedding_unit() : head_unit();
  if (config_.tied) params.gather(head_table);
  Buffer norm_TD = residual_stream(s, "final_norm", x_TD.rows(), config_.width);
  ops::rmsnorm(s, norm_TD, x_TD, params.get(head_unit()).at(kFinalNorm),
               static_cast<float>(config_.norm_eps));
  ops::linear(s, logits_TV, norm_TD, params.get(head_table).at(config_.tied ? kEmbedding : kHead),
              {.alpha = static_cast<float>(config_.logits_multiplier)});
  if (config_.tied) params.release(head_table);
  params.release(head_unit());
}

void Llama::logits(Stream& s, ParamAccess& params, const BatchTensors& batch,
                   Tensor logits_TV) const {
  Buffer x_TD = residual_stream(s, "embedding", batch.tokens(), config_.width);
  run_blocks(s, params, batch, x_TD, [](int64_t, const AttentionSaved*) {});
  project(s, params, x_TD, logits_TV);
}

DecodeCache Llama::allocate_cache(Memory& memory, int64_t sequences, int64_t capacity) const {
  DecodeCache cache;
  for (const Block& block : blocks_) {
    cache.layers.push_back(block.attention().allocate_cache(memory, sequences, capacity));
  }
  return cache;
}

void Llama::prefill(Stream& s, ParamAccess& params, const BatchTensors& batch, DecodeCache& cache,
                    int64_t b, Tensor logits_1V) const {
  Buffer x_TD = residual_stream(s, "embedding", batch.tokens(), config_.width);
  run_blocks(s, params, batch, x_TD, [&](int64_t l, const AttentionSaved* saved) {
    require(saved, "prefill needs a model with Recompute::kNone");
    blocks_[l].attention().prefill(s, *cache.layers[l], b, *saved);
  });
  project(s, params, x_TD.tensor().row_range(batch.tokens() - 1, 1), logits_1V);
}

void Llama::decode(Stream& s, ParamAccess& params, Tensor tokens_B, DecodeCache& cache,
                   const DecodeStep& step, Tensor logits_BV) const {
  const int64_t B = tokens_B.rows();
  Buffer x_BD = residual_stream(s, "embedding", B, config_.width);
  params.gather(block_unit(0));
  embed(s, params, x_BD, tokens_B);
  for (int64_t l = 0; l < config_.layers; ++l) {
    params.gather(block_unit(l + 1));
    Buffer y_BD = residual_stream(s, "block", B, config_.width);
    blocks_[l].decode(s, y_BD, x_BD, params.get(block_unit(l)), *cache.layers[l], step);
    params.release(block_unit(l));
    x_BD = std::move(y_BD);
  }
  project(s, params, x_BD, logits_BV);
}

double Llama::flops_per_token(double keys) const {
  double attention = 0;
  for (const Block& block : blocks_) attention += block.attention().flops_per_token(keys);
  return 6 * static_cast<double>(registry_.count()) + 3 * attention;
}

}  // namespace sbtrain
