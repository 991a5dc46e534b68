#pragma once

#include "model/inference/decode_cache.h"
#include "model/transformer.h"

namespace sbtrain {

// One new token for each of the first B sequences of the cache: logits_BV.
void decode(Stream& s, const Transformer& model, ParamAccess& params, Tensor tokens_B,
            DecodeCache& cache, const DecodeStep& step, Tensor logits_BV);

}  // namespace sbtrain
