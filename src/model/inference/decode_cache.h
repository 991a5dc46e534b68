// What decoding keeps of the tokens seen so far.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/kept_keys.h"
#include "core/memory.h"
#include "model/transformer.h"

namespace sbtrain {

// The attention modules' caches of all layers, for B independent sequences of at most `capacity`
// tokens each.
class DecodeCache {
 public:
  // `dropping` throws ExitCode::kUsage for a model without gates (require_droppable).
  DecodeCache(Memory& memory, const Transformer& model, int64_t sequences, int64_t capacity,
              const KeyDropping& dropping = {});
  AttentionCache& layer(int64_t l) { return *layers_.at(static_cast<size_t>(l)); }
  // Where keys are dropped, else null.
  KeptKeys* kept() { return kept_.get(); }
  const KeptKeys* kept() const { return kept_.get(); }

 private:
  std::unique_ptr<KeptKeys> kept_;
  std::vector<std::unique_ptr<AttentionCache>> layers_;
};

// Throws ExitCode::kUsage if keys are to be dropped and no layer has gates.
void require_droppable(const Transformer& model, const KeyDropping& dropping);

}  // namespace sbtrain
