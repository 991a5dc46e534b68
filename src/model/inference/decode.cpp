#include "model/inference/decode.h"

namespace sbtrain {

void decode(Stream& s, const Transformer& model, ParamAccess& params, Tensor tokens_B,
            DecodeCache& cache, const DecodeStep& step, Tensor logits_BV) {
  Buffer x_BD = model.embedding_buffer(s, tokens_B.rows());
  model.run_blocks(s, params, {.tokens_T = tokens_B, .positions_T = step.positions_B}, x_BD,
                   model.all_blocks(),
                   [&](int64_t l, const Tensor& y_BD, Buffer& x, const Weights& w) {
                     model.block(l).decode(s, y_BD, x, w, cache.layer(l), step);
                   });
  model.project_decoded(s, params, x_BD, logits_BV);
}

}  // namespace sbtrain
