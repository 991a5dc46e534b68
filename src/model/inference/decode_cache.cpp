#include "model/inference/decode_cache.h"

namespace sbtrain {

DecodeCache::DecodeCache(Memory& memory, const Transformer& model, int64_t sequences,
                         int64_t capacity) {
  for (int64_t l = 0; l < model.config().layers; ++l) {
    layers_.push_back(model.block(l).attention().allocate_cache(memory, sequences, capacity));
  }
}

}  // namespace sbtrain
