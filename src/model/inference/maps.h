// What the attention of a model looks at: maps of its heads, and how many keys it has read.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "model/transformer.h"

namespace sbtrain {

// Runs the forward pass of one document and calls visit(layer, head, map), in order, for every head
// of every layer whose attention weighs keys, or of those for which wanted(layer, head).
using MapVisit = std::function<void(int64_t layer, int64_t head, const AttentionMap& map)>;
using MapWanted = std::function<bool(int64_t layer, int64_t head)>;
void attention_maps(Stream& s, const Transformer& model, ParamAccess& params,
                    const BatchTensors& batch, const MapVisit& visit,
                    const MapWanted& wanted = nullptr);

// Runs the forward pass and returns what each layer's attention has read of the keys, and what each
// of its heads has.
std::vector<KeysRead> keys_read(Stream& s, const Transformer& model, ParamAccess& params,
                                const BatchTensors& batch);
std::vector<std::vector<KeysRead>> keys_read_by_head(Stream& s, const Transformer& model,
                                                     ParamAccess& params,
                                                     const BatchTensors& batch);

}  // namespace sbtrain
