// Times single ops: memory-bound ops compared with a copy, and the matrix products of a block.
#include <array>
#include <unordered_set>

#include "bench/bench.h"
#include "bench/timing.h"
#include "core/error.h"
#include "core/philox.h"
#include "ops/activation.h"
#include "ops/embedding.h"
#include "ops/fp8.h"
#include "ops/linear.h"
#include "ops/loss.h"
#include "ops/memory.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rope.h"

namespace sbtrain {
namespace {

void complete(OpsBenchOptions& o, bool cuda) {
  if (o.tokens == 0) o.tokens = cuda ? 32768 : 1024;
  if (o.width == 0) o.width = cuda ? 1536 : 128;
  if (o.inner == 0) o.inner = cuda ? 4096 : 384;
  if (o.vocab == 0) o.vocab = cuda ? 49152 : 4096;
}

class OpsBench {
 public:
  OpsBench(Stream& s, const OpsBenchOptions& options)
      : s_(s),
        random_(s),
        real_(random_.compute()),
        T_(options.tokens),
        D_(options.width),
        F_(options.inner),
        V_(options.vocab),
        repeats_(options.repeats) {
    const Philox random(1, RandomPurpose::kTest, "bench tokens");
    for (int64_t t = 0; t < T_; ++t) {
      tokens_.push_back(static_cast<int32_t>(random.uniform(t) * static_cast<double>(V_)));
    }
    distinct_ = std::unordered_set<int32_t>(tokens_.begin(), tokens_.end()).size();
  }

  std::vector<OpsBenchRow> run() {
    memory();
    norms();
    activations();
    positions();
    embeddings();
    optimizer();
    product("qkv", 3 * D_, D_, false);
    product("out", D_, D_, true);
    product("gate_up", 2 * F_, D_, false);
    product("down", D_, F_, true);
    if (has_fp8()) {
      casts();
      fp8_products("qkv", 3 * D_, D_);
      fp8_products("out", D_, D_);
      fp8_products("gate_up", 2 * F_, D_);
      fp8_products("down", D_, F_);
    }
    loss();
    return std::move(rows_);
  }

 private:
  using Make = std::function<Tensors()>;
  using Call = std::function<void(const Tensors&)>;

  // The size in bytes of `elements` elements of the compute type.
  double reals(int64_t elements) const {
    return static_cast<double>(elements) * static_cast<double>(dtype_size(real_));
  }
  static double f32s(int64_t elements) { return 4.0 * static_cast<double>(elements); }

  Buffer real(std::initializer_list<int64_t> shape) { return random_.normal(real_, shape); }
  Buffer f32(std::initializer_list<int64_t> shape) {
    return random_.constant(DType::kF32, shape, 0);
  }

  void bound_by_memory(const std::string& op, double bytes, const Make& make, const Call& call) {
    const Rotation rotation(make);
    const double seconds = median_seconds(s_, op, rotation, repeats_, call);
    rows_.push_back({.name = op, .seconds = seconds, .bytes = bytes});
  }

  void bound_by_arithmetic(const std::string& name, std::string_view op, double flops,
                           const Make& make, const Call& call) {
    const Rotation rotation(make);
    const double seconds = median_seconds(s_, op, rotation, repeats_, call, /*tune=*/true);
    rows_.push_back({.name = name, .seconds = seconds, .flops = flops});
  }

  // A comment such as "x, w; y" before an op lists the tensors that it reads and, after the
  // semicolon, those that it writes. Every element counts once.
  void memory() {
    bound_by_memory(
        "copy", reals(2 * F_ * T_) + reals(2 * F_ * T_),
        [&] {
          return tensors(real({T_, 2 * F_}), real({T_, 2 * F_}));
        },
        [&](const Tensors& x) { ops::run(s_, ops::Copy{.y = x[0], .x = x[1]}); });
    bound_by_memory(
        "fill", f32s(V_ * D_),
        [&] {
          return tensors(f32({V_, D_}));
        },
        [&](const Tensors& x) { ops::run(s_, ops::Fill{.x = x[0], .value = 0.0f}); });
  }

  void norms() {
    constexpr float kEps = 1e-5f;
    // x, w; y
    bound_by_memory(
        "rmsnorm", reals(T_ * D_ + D_) + reals(T_ * D_),
        [&] {
          return tensors(real({T_, D_}), real({T_, D_}), real({D_}));
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::RmsNorm{.y_TD = x[0], .x_TD = x[1], .w_D = x[2], .eps = kEps});
        });
    // dx, dy, x, w, dw; dx, dw
    bound_by_memory(
        "rmsnorm_backward", reals(3 * T_ * D_ + D_) + f32s(D_) + reals(T_ * D_) + f32s(D_),
        [&] {
          return tensors(real({T_, D_}), f32({D_}), real({T_, D_}), real({T_, D_}), real({D_}));
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::RmsNormBackward{.dx_TD = x[0],
                                            .dw_D = x[1],
                                            .dy_TD = x[2],
                                            .x_TD = x[3],
                                            .w_D = x[4],
                                            .eps = kEps});
        });
  }

  void activations() {
    // gate and up; y
    bound_by_memory(
        "swiglu", reals(2 * T_ * F_) + reals(T_ * F_),
        [&] {
          return tensors(real({T_, F_}), real({T_, 2 * F_}));
        },
        [&](const Tensors& x) { ops::run(s_, ops::Swiglu{.y_TF = x[0], .gate_up_T2F = x[1]}); });
    // dy, gate and up; their gradients
    bound_by_memory(
        "swiglu_backward", reals(3 * T_ * F_) + reals(2 * T_ * F_),
        [&] {
          return tensors(real({T_, 2 * F_}), real({T_, F_}), real({T_, 2 * F_}));
        },
        [&](const Tensors& x) {
          ops::run(s_,
                   ops::SwigluBackward{.dgate_up_T2F = x[0], .dy_TF = x[1], .gate_up_T2F = x[2]});
        });
  }

  // Rotates q and k in place, as columns of the qkv matrix; also reads the positions.
  void positions() {
    const int64_t head_dim = D_ % 64 == 0 ? 64 : D_ % 2 == 0 ? 2 : 0;
    if (head_dim == 0) return;  // an odd width has no rotation
    std::vector<int32_t> numbers;
    for (int64_t t = 0; t < T_; ++t) numbers.push_back(static_cast<int32_t>(t % 4096));
    const ops::RopeParams params{.heads = static_cast<int>(2 * D_ / head_dim),
                                 .frequencies = ops::rope_frequencies(10000.0, head_dim)};
    bound_by_memory(
        "rope", reals(2 * T_ * D_) + f32s(T_) + reals(2 * T_ * D_),
        [&] {
          return tensors(real({T_, 3 * D_}), random_.integers(numbers));
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::Rope{.x_THd = x[0].tensor().col_range(0, 2 * D_),
                                 .positions_T = x[1],
                                 .params = params});
        });
  }

  // Each row of the table counts once, however many tokens use it.
  void embeddings() {
    const auto used = static_cast<int64_t>(distinct_);
    // tokens, rows; y
    bound_by_memory(
        "embedding", f32s(T_) + reals(used * D_) + reals(T_ * D_),
        [&] {
          return tensors(real({T_, D_}), random_.integers(tokens_), real({V_, D_}));
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::Embedding{.y_TD = x[0], .tokens_T = x[1], .w_VD = x[2], .scale = 1.0f});
        });
    // tokens, dy, rows of dw; rows of dw
    bound_by_memory(
        "embedding_backward", f32s(T_) + reals(T_ * D_) + f32s(used * D_) + f32s(used * D_),
        [&] {
          return tensors(f32({V_, D_}), real({T_, D_}), random_.integers(tokens_));
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::EmbeddingBackward{
                           .dw_VD = x[0], .dy_TD = x[1], .tokens_T = x[2], .scale = 1.0f});
        });
  }

  // Updates the whole embedding.
  void optimizer() {
    const int64_t n = V_ * D_;
    bound_by_memory(
        "add_squared_norm", f32s(n),
        [&] { return tensors(random_.constant(DType::kF64, {1}, 0), f32({n})); },
        [&](const Tensors& x) {
          ops::run(s_, ops::AddSquaredNorm{.y_1 = x[0], .x = x[1].tensor().reshaped({1, n})});
        });
    const bool copies = real_ != DType::kF32;  // f32 weights are their own compute copy
    std::array<double, ops::kStepStats> stats{};
    stats[ops::kApply] = stats[ops::kGradScale] = stats[ops::kBias1] = stats[ops::kBias2] = 1;
    const ops::DecayRange all{.begin = 0, .end = n};
    // w, m, v, gradient; w, m, v, the compute copy
    bound_by_memory(
        "adamw", f32s(4 * n) + f32s(3 * n) + (copies ? reals(n) : 0),
        [&] {
          Tensors x = tensors(random_.normal(DType::kF32, {n}), f32({n}), f32({n}),
                              random_.normal(DType::kF32, {n}),
                              random_.empty(DType::kF64, {ops::kStepStats}));
          ops::run(s_, ops::CopyFromHost{.y = x[4], .host = stats.data()});
          if (copies) x.push_back(random_.empty(real_, {n}));
          return x;
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::AdamW{.w_N = x[0],
                                  .m_N = x[1],
                                  .v_N = x[2],
                                  .grad_N = x[3],
                                  .compute_N = copies ? x[5].tensor() : Tensor(),
                                  .stats = x[4],
                                  .decays = {&all, 1},
                                  .lr = 1e-4f,
                                  .decay = 0.1f});
        });
  }

  // y_TN = x_TK w_NK^T and its two gradients.
  void product(const std::string& name, int64_t N, int64_t K, bool with_residual) {
    const double flops =
        2.0 * static_cast<double>(T_) * static_cast<double>(N) * static_cast<double>(K);
    bound_by_arithmetic(
        name, "linear", flops,
        [&] {
          Tensors x = tensors(real({T_, N}), real({T_, K}), random_.normal(real_, {N, K}, 0.02f));
          if (with_residual) x.push_back(real({T_, N}));
          return x;
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::Linear{.y_TN = x[0],
                                   .x_TK = x[1],
                                   .w_NK = x[2],
                                   .residual = with_residual ? x[3].tensor() : Tensor()});
        });
    bound_by_arithmetic(
        name + " backward input", "linear_backward", flops,
        [&] {
          return tensors(real({T_, K}), real({T_, N}), random_.normal(real_, {N, K}, 0.02f));
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::LinearBackward{.dx_TK = x[0], .dy_TN = x[1], .w_NK = x[2]});
        });
    bound_by_arithmetic(
        name + " backward weight", "linear_backward", flops,
        [&] {
          return tensors(f32({N, K}), real({T_, N}), real({T_, K}));
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::LinearBackward{.dw_NK = x[0], .dy_TN = x[1], .x_TK = x[2]});
        });
  }

  // Whether this machine has such products, and takes these sizes.
  bool has_fp8() const {
    const auto fits = [](int64_t size) { return size % kFp8Multiple == 0; };
    return (!ops::on_cuda(s_) || s_.target().sm >= 89) && fits(T_) && fits(D_) && fits(F_);
  }

  Buffer fp8(DType dtype, std::initializer_list<int64_t> shape) {
    return random_.empty(dtype, shape);
  }

  // A scale of 1 for normal numbers.
  Buffer one() { return random_.constant(DType::kF32, {1}, 1.0f); }

  // Of an input as wide as the model, what stands in front of its products.
  void casts() {
    const double read = reals(T_ * D_), written = static_cast<double>(T_ * D_);
    bound_by_memory(
        "amax", read,
        [&] {
          return tensors(real({T_, D_}), one());
        },
        [&](const Tensors& x) { ops::run(s_, ops::Amax{.amax_1 = x[1], .x_RC = x[0]}); });
    const auto cast = [&](const std::string& name, double bytes, bool rows, bool columns) {
      const Rotation rotation([&] {
        return tensors(real({T_, D_}), one(), one(), fp8(DType::kE4M3, {T_, D_}),
                       fp8(DType::kE4M3, {D_, T_}));
      });
      const double seconds =
          median_seconds(s_, "cast_fp8", rotation, repeats_, [&](const Tensors& x) {
            ops::run(s_, ops::CastFp8{.y_RC = rows ? x[3].tensor() : Tensor(),
                                      .y_CR = columns ? x[4].tensor() : Tensor(),
                                      .inverse_scale_1 = x[2],
                                      .x_RC = x[0],
                                      .amax_1 = x[1]});
          });
      rows_.push_back({.name = name, .seconds = seconds, .bytes = bytes});
    };
    cast("cast to fp8", read + written, true, false);
    cast("cast to fp8, transposed", read + written, false, true);
    cast("cast to fp8, both", read + 2 * written, true, true);
  }

  // A matrix of normal numbers in fp8.
  Buffer random_fp8(DType dtype, int64_t rows, int64_t cols) {
    const Buffer x = real({rows, cols}), amax = one(), scale = one();
    Buffer y = fp8(dtype, {rows, cols});
    ops::run(s_, ops::Amax{.amax_1 = amax, .x_RC = x});
    ops::run(s_, ops::CastFp8{.y_RC = y, .inverse_scale_1 = scale, .x_RC = x, .amax_1 = amax});
    ops::run(s_, ops::Synchronize{});
    return y;
  }

  // The three products of product(), of factors that are in fp8 already.
  void fp8_products(const std::string& name, int64_t N, int64_t K) {
    const auto one_product = [&](const std::string& row, int64_t m, int64_t n, int64_t k, DType a,
                                 DType y, bool fast) {
      bound_by_arithmetic(
          row, "fp8_product",
          2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
          [&] {
            return tensors(random_.constant(y, {m, n}, 0), random_fp8(a, m, k),
                           random_fp8(DType::kE4M3, n, k), one());
          },
          [&](const Tensors& x) {
            ops::run(s_, ops::Fp8Product{.y_MN = x[0],
                                         .a_MK = {x[1], x[3]},
                                         .b_NK = {x[2], x[3]},
                                         .fast_accumulation = fast});
          });
    };
    one_product(name + " fp8", T_, N, K, DType::kE4M3, real_, true);
    one_product(name + " fp8 backward input", T_, K, N, DType::kE5M2, real_, true);
    one_product(name + " fp8 backward weight", N, K, T_, DType::kE5M2, DType::kF32, false);
  }

  // The head and the loss, forward and backward: three products of T x V x D.
  void loss() {
    const double flops =
        6.0 * static_cast<double>(T_) * static_cast<double>(V_) * static_cast<double>(D_);
    bound_by_arithmetic(
        "linear_cross_entropy", "linear_cross_entropy", flops,
        [&] {
          return tensors(f32({T_}), real({T_, D_}), f32({V_, D_}), real({T_, D_}),
                         random_.normal(real_, {V_, D_}, 0.02f), random_.integers(tokens_));
        },
        [&](const Tensors& x) {
          ops::run(s_, ops::CrossEntropy{.loss_T = x[0],
                                         .dx_TD = x[1],
                                         .dw_VD = x[2],
                                         .x_TD = x[3],
                                         .w_VD = x[4],
                                         .targets_T = x[5],
                                         .loss_weight = 1.0f / static_cast<float>(T_)});
        });
  }

  Stream& s_;
  RandomTensors random_;
  DType real_;
  int64_t T_, D_, F_, V_, repeats_;
  std::vector<int32_t> tokens_;
  size_t distinct_ = 0;
  std::vector<OpsBenchRow> rows_;
};

}  // namespace

std::vector<OpsBenchRow> bench_ops(Backend backend, OpsBenchOptions options) {
  complete(options, backend == Backend::kCuda);
  constexpr int64_t kSetNode = 32;  // bytes of a token in a set
  require_sizes(backend, options.tokens * (4 + kSetNode),
                {options.tokens, std::max(options.width, options.inner)},
                {std::max(options.vocab, options.inner), options.width});
  Memory memory(backend);
  Stream stream(memory);
  return OpsBench(stream, options).run();
}

}  // namespace sbtrain
