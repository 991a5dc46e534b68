// `sgd_momentum`: gradient descent with heavy-ball momentum (Polyak, 1964),
//   m = momentum m + g;  w -= lr (m + decay w)
#include "ops/memory.h"
#include "ops/run.h"
#include "optim/optimizer.h"

namespace sbtrain {
namespace {

// The formula above on N elements, unless kApply is 0.
struct SgdMomentumStep {
  static constexpr std::string_view kName = "sgd_momentum";
  Tensor w_N, m_N, grad_N;
  Tensor compute_N{};  // optional, the new weights in the compute type
  Tensor stats;
  std::span<const ops::DecayRange> decays{};
  float lr, momentum, decay;

  void check() const {
    const ops::Check c(kName);
    for (const Tensor& x : {w_N, m_N, grad_N}) c.flat("w_N, m_N or grad_N", x, w_N.numel());
    c.flat("stats", stats, ops::kStepStats, DType::kF64);
  }
};

void run(ops::cpu::Cpu, Stream& s, const SgdMomentumStep& op) {
  if (op.stats.f64()[ops::kApply] == 0) return;
  const auto scale = static_cast<float>(op.stats.f64()[ops::kGradScale]);
  size_t range = 0;
  for (int64_t i = 0; i < op.w_N.numel(); ++i) {
    while (range < op.decays.size() && i >= op.decays[range].end) ++range;
    const bool decays = range < op.decays.size() && i >= op.decays[range].begin;
    float& w = op.w_N.f32()[i];
    float& m = op.m_N.f32()[i];
    m = op.momentum * m + scale * op.grad_N.f32()[i];
    w -= op.lr * (m + (decays ? op.decay * w : 0.0f));
  }
  if (op.compute_N.defined()) ops::run(s, ops::Copy{.y = op.compute_N, .x = op.w_N});
}

struct Options {
  double momentum = 0.9;
  bool operator==(const Options&) const = default;
};

void describe(Fields& f, Options& o) {
  f.add("momentum", o.momentum, from_to_below(0, 1), "Share of the last step that is repeated.");
}

class SgdMomentum : public Optimizer {
 public:
  explicit SgdMomentum(const Options& options) : options_(options) {}

  std::vector<std::string> states(const TensorSpec& /*spec*/) const override {
    return {"sgd_momentum"};
  }

  void update(Stream& s, const UpdateInputs& in, std::span<const FlatView> views) const override {
    for (const FlatView& view : views) {
      ops::run(s, SgdMomentumStep{.w_N = view.weights,
                                  .m_N = view.states.at(0),
                                  .grad_N = view.gradient,
                                  .compute_N = view.compute,
                                  .stats = in.stats,
                                  .decays = view.decays,
                                  .lr = in.lr,
                                  .momentum = static_cast<float>(options_.momentum),
                                  .decay = in.weight_decay});
    }
  }

 private:
  Options options_;
};

}  // namespace

void register_sgd_momentum(OptimizerRegistry& registry) {
  registry.add<SgdMomentum, Options>("sgd_momentum");
}

}  // namespace sbtrain
