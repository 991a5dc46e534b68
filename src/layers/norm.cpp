#include "layers/norm.h"

#include "ops/fp8.h"
#include "ops/norm.h"

namespace sbtrain {

Norm::Norm(NormSpec spec)
    : centered_(spec.kind == NormKind::kLayerNorm),
      eps_(spec.eps),
      width_(spec.width),
      weight_(spec.name + ".weight"),
      bias_(spec.name + ".bias") {}

void Norm::add_parameters(std::vector<TensorSpec>& specs) const {
  specs.push_back({.name = weight_,
                   .shape = {width_},
                   .storage = {},
                   .init = Init::constant(1),
                   .one_product = !centered_});
  if (!centered_) return;
  specs.push_back({.name = bias_, .shape = {width_}, .storage = {}, .init = Init::constant(0)});
}

void Norm::forward(Stream& s, Tensor y_TD, Tensor x_TD, const Weights& w, Tensor amax_1) const {
  if (centered_) {
    ops::run(
        s, ops::LayerNorm{
               .y_TD = y_TD, .x_TD = x_TD, .w_D = w.at(weight_), .b_D = w.at(bias_), .eps = eps_});
    if (amax_1.defined()) ops::run(s, ops::Amax{.amax_1 = amax_1, .x_RC = y_TD});
  } else {
    ops::run(s,
             ops::RmsNorm{
                 .y_TD = y_TD, .x_TD = x_TD, .w_D = w.at(weight_), .eps = eps_, .amax_1 = amax_1});
  }
}

void Norm::backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dy_TD, Tensor x_TD,
                    const Weights& w, Tensor amax_1) const {
  if (centered_) {
    ops::run(s, ops::LayerNormBackward{.dx_TD = dx_TD,
                                       .dw_D = dw.at(weight_),
                                       .db_D = dw.at(bias_),
                                       .dy_TD = dy_TD,
                                       .x_TD = x_TD,
                                       .w_D = w.at(weight_),
                                       .eps = eps_,
                                       .accumulate = true});
    if (amax_1.defined()) ops::run(s, ops::Amax{.amax_1 = amax_1, .x_RC = dx_TD});
  } else {
    ops::run(s, ops::RmsNormBackward{.dx_TD = dx_TD,
                                     .dw_D = dw.at(weight_),
                                     .dy_TD = dy_TD,
                                     .x_TD = x_TD,
                                     .w_D = w.at(weight_),
                                     .eps = eps_,
                                     .accumulate_dw = !dw.fresh(weight_),
                                     .amax_1 = amax_1});
  }
}

}  // namespace sbtrain
