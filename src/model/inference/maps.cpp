#include "model/inference/maps.h"

#include <memory>

#include "core/error.h"

namespace sbtrain {

void attention_maps(Stream& s, const Transformer& model, ParamAccess& params,
                    const BatchTensors& batch, const MapVisit& visit, const MapWanted& wanted) {
  require(batch.sequences.count == 1, "attention maps take one document, not {}",
          batch.sequences.count);
  Buffer x_TD = model.embedding_buffer(s, batch.tokens());
  const auto visit_layer = [&](int64_t l, const Weights& w,
                               const std::unique_ptr<AttentionSaved>& saved) {
    require(saved != nullptr, "attention maps need a model with Recompute::kNone");
    for (int64_t h = 0; h < model.config().heads; ++h) {
      if (wanted && !wanted(l, h)) continue;
      const AttentionMap map = model.block(l).attention().map(s, w, *saved, batch.sequences, h);
      if (map.tokens > 0) visit(l, h, map);
    }
  };
  model.forward(s, params, batch, x_TD, model.all_blocks(), visit_layer);
  model.release_head(params);
}

std::vector<KeysRead> keys_read(Stream& s, const Transformer& model, ParamAccess& params,
                                const BatchTensors& batch) {
  std::vector<KeysRead> layers;
  for (const std::vector<KeysRead>& heads : keys_read_by_head(s, model, params, batch)) {
    KeysRead& layer = layers.emplace_back();
    for (const KeysRead& head : heads) layer += head;
  }
  return layers;
}

std::vector<std::vector<KeysRead>> keys_read_by_head(Stream& s, const Transformer& model,
                                                     ParamAccess& params,
                                                     const BatchTensors& batch) {
  Buffer x_TD = model.embedding_buffer(s, batch.tokens());
  std::vector<std::vector<KeysRead>> layers;
  const auto visit_layer = [&](int64_t l, const Weights& /*w*/,
                               const std::unique_ptr<AttentionSaved>& saved) {
    require(saved != nullptr, "counting keys needs a model with Recompute::kNone");
    layers.push_back(model.block(l).attention().keys_read_by_head(s, *saved, batch.sequences));
  };
  model.forward(s, params, batch, x_TD, model.all_blocks(), visit_layer);
  model.release_head(params);
  return layers;
}

}  // namespace sbtrain
