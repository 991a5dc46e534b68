// Muon (Jordan, 2024; arXiv 2502.16982): the step of a matrix is its orthogonalised momentum.
//
// For the weights of Linear layers, with the gradient g after clipping:
//   m = momentum m + g;  u = g + momentum m (Nesterov);  o = orthogonalised u (ops::Orthogonalize)
//   w -= lr (0.2 sqrt(max(rows, cols)) o + decay w)
// The factor makes the elements of a step about as large as AdamW's, so that its rate and decay
// carry over (arXiv 2502.16982, equation 4); rows and columns are the logical ones. Everything else
// is updated by AdamW: embedding, head, learned positions, norms, biases, gates, convolutions.
#include "ops/muon.h"

#include <algorithm>
#include <cmath>

#include "core/enum_names.h"
#include "optim/adamw.h"

namespace sbtrain {

// What of the weights of queries, of keys and of values is one matrix.
enum class QkvMatrices : uint8_t { kWhole, kGroup, kHead };
template <>
inline constexpr auto kNames<QkvMatrices> = enum_names<QkvMatrices>({{QkvMatrices::kWhole, "whole"},
                                                                     {QkvMatrices::kGroup, "group"},
                                                                     {QkvMatrices::kHead, "head"}});

namespace {

constexpr const char* kMomentum = "muon_m";

struct Options {
  AdamWOptions adamw;
  double momentum = 0.95;
  bool nesterov = true;
  QkvMatrices qkv = QkvMatrices::kWhole;
  bool operator==(const Options&) const = default;
};

void describe(Fields& f, Options& o) {
  describe(f, o.adamw);
  f.add("momentum", o.momentum, from_to_below(0, 1), "Decay of the momentum.");
  f.add("nesterov", o.nesterov, "Nesterov momentum: the step looks ahead by one momentum.");
  f.add(
      "qkv_matrices", o.qkv,
      "What is orthogonalised by itself of the weights of queries, of keys and of values: each of "
      "the three whole; the heads that share keys and values; or each head.");
}

class Muon : public Optimizer {
 public:
  explicit Muon(const Options& options) : options_(options), adamw_(options.adamw) {}

  std::vector<std::string> states(const TensorSpec& spec) const override {
    return takes_matrix(spec) ? std::vector<std::string>{kMomentum} : adamw_.states(spec);
  }
  bool takes_matrix(const TensorSpec& spec) const override {
    return spec.role == ParamRole::kLinear && spec.shape.size() == 2;
  }
  double transform_flops(const TensorSpec& spec) const override {
    const int64_t count = matrices(spec);
    return static_cast<double>(count) *
           ops::Orthogonalize::flops(spec.stored()[0] / count, spec.stored()[1]);
  }
  Means means() const override { return adamw_.means(); }

  void update(Stream& s, const UpdateInputs& in, std::span<const FlatView> views) const override {
    adamw_.update(s, in, views);
  }

  void direct(Stream& s, const UpdateInputs& in, std::span<const MatrixView> parts) const override {
    for (const MatrixView& part : parts) {
      ops::run(s, ops::MuonMomentum{.y_N = part.travels,
                                    .m_N = part.states.at(0),
                                    .grad_N = part.gradient,
                                    .stats = in.stats,
                                    .momentum = static_cast<float>(options_.momentum),
                                    .nesterov = options_.nesterov});
    }
  }

  void transform(Stream& s, const TensorSpec& spec, Tensor x_NK) const override {
    const int64_t count = matrices(spec);
    const int64_t rows = x_NK.rows() / count;
    for (int64_t i = 0; i < count; ++i) {
      ops::run(s, ops::Orthogonalize{.x_NK = x_NK.row_range(i * rows, rows)});
    }
  }

  void apply(Stream& s, const UpdateInputs& in, std::span<const MatrixView> parts) const override {
    for (const MatrixView& part : parts) {
      ops::run(s, ops::MuonUpdate{.w_N = part.weights,
                                  .y_N = part.travels,
                                  .compute_N = part.compute,
                                  .stats = in.stats,
                                  .lr = in.lr,
                                  .scale = scale(*part.spec),
                                  .decay = part.spec->decay ? in.weight_decay : 0.0f});
    }
  }

 private:
  // The number of matrices, of equal size, that the rows of a parameter are. Rows that are padded,
  // or are not those of heads, are one.
  int64_t matrices(const TensorSpec& spec) const {
    const int64_t count = options_.qkv == QkvMatrices::kHead    ? spec.heads
                          : options_.qkv == QkvMatrices::kGroup ? spec.groups
                                                                : 1;
    return spec.stored()[0] == spec.shape[0] && spec.shape[0] % count == 0 ? count : 1;
  }
  float scale(const TensorSpec& spec) const {
    const int64_t rows = spec.shape[0] / matrices(spec);
    return static_cast<float>(0.2 * std::sqrt(static_cast<double>(std::max(rows, spec.shape[1]))));
  }

  Options options_;
  AdamW adamw_;
};

}  // namespace

void register_muon(OptimizerRegistry& registry) {
  registry.add<Muon, Options>("muon");
}

}  // namespace sbtrain
