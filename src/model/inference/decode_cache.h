// What decoding keeps of the tokens seen so far.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "core/memory.h"
#include "model/transformer.h"

namespace sbtrain {

// The attention modules' caches of all layers, for B independent sequences of at most `capacity`
// tokens each.
class DecodeCache {
 public:
  DecodeCache(Memory& memory, const Transformer& model, int64_t sequences, int64_t capacity);
  AttentionCache& layer(int64_t l) { return *layers_.at(static_cast<size_t>(l)); }

 private:
  std::vector<std::unique_ptr<AttentionCache>> layers_;
};

}  // namespace sbtrain
