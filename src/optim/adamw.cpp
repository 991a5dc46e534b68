#include "optim/adamw.h"

namespace sbtrain {

void describe(Fields& f, AdamWOptions& o) {
  f.add("beta1", o.beta1, from_to_below(0, 1), "AdamW: decay of the first moment.");
  f.add("beta2", o.beta2, from_to_below(0, 1), "AdamW: decay of the second moment.");
  f.add("eps", o.eps, above(0), "AdamW: epsilon.");
}

std::vector<std::string> AdamW::states(const TensorSpec& /*spec*/) const {
  return {kAdamM, kAdamV};
}

void AdamW::update(Stream& s, const UpdateInputs& in, std::span<const FlatView> views) const {
  std::vector<ops::AdamW> ranges;
  for (const FlatView& view : views) {
    ranges.push_back({.w_N = view.weights,
                      .m_N = view.states.at(0),
                      .v_N = view.states.at(1),
                      .grad_N = view.gradient,
                      .compute_N = view.compute,
                      .stats = in.stats,
                      .decays = view.decays,
                      .lr = in.lr,
                      .beta1 = static_cast<float>(options_.beta1),
                      .beta2 = static_cast<float>(options_.beta2),
                      .eps = static_cast<float>(options_.eps),
                      .decay = in.weight_decay});
  }
  ops::run(s, ops::AdamWs{.ranges = ranges});
}

void register_adamw(OptimizerRegistry& registry) {
  registry.add<AdamW, AdamWOptions>("adamw");
}

}  // namespace sbtrain
