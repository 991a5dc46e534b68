#include "model/decode_cache.h"

namespace sbtrain {

DecodeCache::DecodeCache(Memory& memory, const std::vector<Block>& blocks, int64_t sequences,
                         int64_t capacity) {
  for (const Block& block : blocks) {
    layers_.push_back(block.attention().allocate_cache(memory, sequences, capacity));
  }
}

}  // namespace sbtrain
