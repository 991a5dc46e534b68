#include "model/inference/decode_cache.h"

#include "core/error.h"

namespace sbtrain {
namespace {

int64_t dropping_layers(const Transformer& model) {
  int64_t count = 0;
  for (int64_t l = 0; l < model.config().layers; ++l) {
    count += model.block(l).attention().drops_keys() ? 1 : 0;
  }
  return count;
}

}  // namespace

void require_droppable(const Transformer& model, const KeyDropping& dropping) {
  if (!dropping.active() || dropping_layers(model) > 0) return;
  fail(ExitCode::kUsage,
       "--drop-below: no layer of the model has a forget gate (model.attention.forget_gate), "
       "without which a later query may give any weight to any key, so that none can be dropped");
}

DecodeCache::DecodeCache(Memory& memory, const Transformer& model, int64_t sequences,
                         int64_t capacity, const KeyDropping& dropping) {
  require_droppable(model, dropping);
  if (dropping.active()) {
    kept_ = std::make_unique<KeptKeys>(memory, model.config(), dropping_layers(model), sequences,
                                       capacity, dropping);
  }
  int64_t dropped = 0;  // layers that drop keys
  for (int64_t l = 0; l < model.config().layers; ++l) {
    const Attention& attention = model.block(l).attention();
    layers_.push_back(kept_ && attention.drops_keys()
                          ? attention.dropping_cache(*kept_, dropped++)
                          : attention.allocate_cache(memory, sequences, capacity));
  }
}

}  // namespace sbtrain
