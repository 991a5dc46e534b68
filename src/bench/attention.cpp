// Attention forward and backward, apart from the model.
#include "ops/attention.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "bench/bench.h"
#include "bench/timing.h"
#include "core/error.h"
#include "ops/coca.h"
#include "ops/rebased.h"

namespace sbtrain {
namespace {

struct Case {
  int64_t tokens, width, head_dim, length, repeats;
  float skip_epsilon;
  int64_t window;
  bool quadratic;
  int heads() const { return static_cast<int>(width / head_dim); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_dim)); }
};

// Equal documents that fill the micro-batch.
struct Documents {
  Documents(RandomTensors& random, int64_t tokens, int64_t length) {
    std::vector<int32_t> position_of, begins;
    for (int64_t t = 0; t < tokens; ++t) position_of.push_back(static_cast<int32_t>(t % length));
    for (int64_t t = 0; t <= tokens; t += length) begins.push_back(static_cast<int32_t>(t));
    positions = random.integers(position_of);
    cu_seqlens = random.integers(begins);
    sequences = {.cu_seqlens = cu_seqlens,
                 .positions_T = positions,
                 .count = tokens / length,
                 .max_seqlen = length};
  }
  Buffer positions, cu_seqlens;
  Sequences sequences;
};

// The tensors of one call. q, k and v are columns of one matrix, as in a model; so are their
// gradients.
enum : size_t { kQkv, kDqkv, kO, kDo, kStatistic, kStop };

Tensors make_tensors(RandomTensors& random, const Case& c, bool stickbreaking) {
  const DType real = random.compute();
  Tensors all = tensors(
      random.normal(real, {c.tokens, 3 * c.width}), random.empty(real, {c.tokens, 3 * c.width}),
      random.empty(real, {c.tokens, c.width}), random.normal(real, {c.tokens, c.width}),
      random.empty(DType::kF32, {c.heads(), c.tokens}));
  if (stickbreaking) all.push_back(random.empty(DType::kI32, {c.heads(), c.tokens}));
  return all;
}

Tensor third(const Buffer& qkv, int64_t index) {
  const int64_t width = qkv.tensor().cols() / 3;
  return qkv.tensor().col_range(index * width, width);
}

AttentionBenchRow time_stickbreaking(Stream& s, RandomTensors& random, const Case& c) {
  const Documents documents(random, c.tokens, c.length);
  const Rotation rotation([&] { return make_tensors(random, c, true); });
  const ops::StickBreakingParams params{
      .heads = c.heads(), .scale = c.scale(), .skip_epsilon = c.skip_epsilon};
  const auto forward = [&](const Tensors& x) {
    ops::run(s, ops::StickBreakingForward{.o_THd = x[kO],
                                          .log2_rem_HT = x[kStatistic],
                                          .stop_HT = x[kStop],
                                          .q_THd = third(x[kQkv], 0),
                                          .k_THd = third(x[kQkv], 1),
                                          .v_THd = third(x[kQkv], 2),
                                          .sequences = documents.sequences,
                                          .params = params});
  };
  const auto backward = [&](const Tensors& x) {
    ops::run(s, ops::StickBreakingBackward{.dq_THd = third(x[kDqkv], 0),
                                           .dk_THd = third(x[kDqkv], 1),
                                           .dv_THd = third(x[kDqkv], 2),
                                           .do_THd = x[kDo],
                                           .log2_rem_HT = x[kStatistic],
                                           .stop_HT = x[kStop],
                                           .q_THd = third(x[kQkv], 0),
                                           .k_THd = third(x[kQkv], 1),
                                           .v_THd = third(x[kQkv], 2),
                                           .sequences = documents.sequences,
                                           .params = params});
  };
  AttentionBenchRow row;
  row.forward_seconds = median_seconds(s, "stickbreaking_forward", rotation, c.repeats, forward);
  row.backward_seconds = median_seconds(s, "stickbreaking_backward", rotation, c.repeats, backward);
  return row;
}

// Softmax attention as one of its modules calls it; a time is that of all its ops.
class SoftmaxBench {
 public:
  SoftmaxBench(Stream& s, RandomTensors& random, const Case& c, std::string_view module)
      : stream_(s),
        documents_(random, c.tokens, c.length),
        coca_(module == "coca"),
        alibi_(module == "alibi"),
        fire_(module == "fire"),
        rotation_([&] { return make_softmax_tensors(random, c, coca_); }),
        params_{
            .heads = c.heads(), .scale = c.scale(), .window = module == "window" ? c.window : 0},
        repeats_(c.repeats) {
    if (fire_) make_fire(random, c.heads());
  }

  AttentionBenchRow times() const {
    AttentionBenchRow row;
    const auto forward = [&](const Tensors& x) { run_forward(x); };
    const auto backward = [&](const Tensors& x) { run_backward(x); };
    const auto add = [&](double& seconds, const char* op, const auto& call) {
      seconds += median_seconds(stream_, op, rotation_, repeats_, call);
    };
    add(row.forward_seconds, "softmax_forward", forward);
    add(row.backward_seconds, "softmax_backward", backward);
    if (!coca_) return row;
    for (const char* op : {"coca_query", "coca_key"}) add(row.forward_seconds, op, forward);
    for (const char* op : {"coca_query", "coca_query_backward", "coca_key_backward"}) {
      add(row.backward_seconds, op, backward);
    }
    return row;
  }

 private:
  enum : size_t { kQuery = kStatistic + 1, kKey };  // of CoCA
  static Tensors make_softmax_tensors(RandomTensors& random, const Case& c, bool coca) {
    Tensors all = make_tensors(random, c, false);
    for (int i = 0; coca && i < 2; ++i) {
      all.push_back(random.normal(random.compute(), {c.tokens, c.width}));
    }
    return all;
  }
  void make_fire(RandomTensors& random, int64_t heads) {
    constexpr int64_t K = ops::kFireHidden;
    const auto add = [&](Buffer value) {
      fire_gradients_.push_back(random.constant(DType::kF32, {value.tensor().numel()}, 0.0f));
      fire_values_.push_back(std::move(value));
    };
    const DType real = random.compute();
    add(random.constant(real, {1}, 0.1f));
    add(random.constant(real, {1}, 1.0f));
    add(random.normal(real, {K}, 0.6f));
    add(random.normal(real, {K}, 0.6f));
    add(random.normal(real, {heads * K}, 0.1f));
    add(random.constant(real, {heads}, 0.0f));
  }
  static ops::FireTensors fire_tensors(const Tensors& x) {
    if (x.empty()) return {};
    return {.c_1 = x[0], .m_1 = x[1], .w1_K = x[2], .b1_K = x[3], .w2_HK = x[4], .b2_H = x[5]};
  }
  ops::SoftmaxBias bias() const {
    if (alibi_) return {.kind = ops::PositionBias::kAlibi};
    if (!fire_) return {};
    return {.kind = ops::PositionBias::kFire, .fire = fire_tensors(fire_values_)};
  }
  ops::CocaParams coca() const { return {.rope = {.heads = params_.heads}}; }
  Tensor query(const Tensors& x) const { return coca_ ? x[kQuery] : third(x[kQkv], 0); }
  Tensor key(const Tensors& x) const { return coca_ ? x[kKey] : third(x[kQkv], 1); }

  void run_forward(const Tensors& x) const {
    const Tensor& positions_T = documents_.sequences.positions_T;
    if (coca_) {
      ops::run(stream_, ops::CocaQuery{.y_THd = x[kQuery],
                                       .q_THd = third(x[kQkv], 0),
                                       .positions_T = positions_T,
                                       .params = coca()});
      ops::run(stream_, ops::CocaKey{.y_THd = x[kKey],
                                     .t_THd = third(x[kQkv], 1),
                                     .positions_T = positions_T,
                                     .params = coca()});
    }
    ops::run(stream_, ops::SoftmaxForward{.o_THd = x[kO],
                                          .lse_HT = x[kStatistic],
                                          .q_THd = query(x),
                                          .k_THd = key(x),
                                          .v_THd = third(x[kQkv], 2),
                                          .bias = bias(),
                                          .sequences = documents_.sequences,
                                          .params = params_});
  }
  void run_backward(const Tensors& x) const {
    const Tensor& positions_T = documents_.sequences.positions_T;
    const Tensor q = third(x[kQkv], 0), dq = third(x[kDqkv], 0), dk = third(x[kDqkv], 1);
    if (coca_)
      ops::run(stream_,
               ops::CocaQuery{
                   .y_THd = x[kQuery], .q_THd = q, .positions_T = positions_T, .params = coca()});
    ops::run(stream_, ops::SoftmaxBackward{.dq_THd = dq,
                                           .dk_THd = dk,
                                           .dv_THd = third(x[kDqkv], 2),
                                           .dfire = fire_tensors(fire_gradients_),
                                           .do_THd = x[kDo],
                                           .o_THd = x[kO],
                                           .lse_HT = x[kStatistic],
                                           .q_THd = query(x),
                                           .k_THd = key(x),
                                           .v_THd = third(x[kQkv], 2),
                                           .bias = bias(),
                                           .sequences = documents_.sequences,
                                           .params = params_});
    if (!coca_) return;
    ops::run(
        stream_,
        ops::CocaQueryBackward{
            .dq_THd = dq, .dy_THd = dq, .q_THd = q, .positions_T = positions_T, .params = coca()});
    ops::run(stream_, ops::CocaKeyBackward{.dt_THd = dk,
                                           .dy_THd = dk,
                                           .y_THd = x[kKey],
                                           .positions_T = positions_T,
                                           .params = coca()});
  }

  Stream& stream_;
  Documents documents_;
  bool coca_, alibi_, fire_;
  Rotation rotation_;
  Tensors fire_values_, fire_gradients_;
  ops::SoftmaxParams params_;
  int64_t repeats_;
};

// Pairs of query and key of one document, about: the half of a square, or a band of it.
double pairs(double length, double window) {
  if (window == 0 || window >= length) return length * length / 2;
  return window * length - window * window / 2;
}

// Heads of kRebasedFeatures features and head_dim values; features and values are columns of one
// matrix, as in a model.
constexpr int64_t kRebasedFeatures = 16;

struct RebasedColumns {
  explicit RebasedColumns(const Tensor& all, const Case& c)
      : q(all.col_range(0, c.heads() * kRebasedFeatures)),
        k(all.col_range(q.cols(), q.cols())),
        v(all.col_range(2 * q.cols(), c.width)) {}
  Tensor q, k, v;
};

AttentionBenchRow time_rebased(Stream& s, RandomTensors& random, const Case& c, bool rebased) {
  const Documents documents(random, c.tokens, c.length);
  const int64_t columns = 2 * c.heads() * kRebasedFeatures + c.width;
  const DType real = random.compute();
  const Rotation rotation([&] {
    return tensors(random.normal(real, {c.tokens, columns}),
                   random.empty(real, {c.tokens, columns}), random.empty(real, {c.tokens, c.width}),
                   random.normal(real, {c.tokens, c.width}),
                   random.empty(DType::kF32, {c.heads(), c.tokens}));
  });
  const ops::RebasedParams params{.heads = c.heads(),
                                  .scale = 0.25f,
                                  .constant = rebased ? 0.0f : 1.0f,
                                  .linear = rebased ? 0.0f : 1.0f,
                                  .square = rebased ? 1.0f : 0.5f,
                                  .quadratic = c.quadratic};
  const auto forward = [&](const Tensors& x) {
    const RebasedColumns of(x[kQkv], c);
    ops::run(s, ops::RebasedForward{.o_THe = x[kO],
                                    .den_HT = x[kStatistic],
                                    .q_THf = of.q,
                                    .k_THf = of.k,
                                    .v_THe = of.v,
                                    .sequences = documents.sequences,
                                    .params = params});
  };
  const auto backward = [&](const Tensors& x) {
    const RebasedColumns of(x[kQkv], c);
    const RebasedColumns gradients(x[kDqkv], c);
    ops::run(s, ops::RebasedBackward{.dq_THf = gradients.q,
                                     .dk_THf = gradients.k,
                                     .dv_THe = gradients.v,
                                     .do_THe = x[kDo],
                                     .o_THe = x[kO],
                                     .den_HT = x[kStatistic],
                                     .q_THf = of.q,
                                     .k_THf = of.k,
                                     .v_THe = of.v,
                                     .sequences = documents.sequences,
                                     .params = params});
  };
  AttentionBenchRow row;
  row.forward_seconds = median_seconds(s, "rebased_forward", rotation, c.repeats, forward);
  row.backward_seconds = median_seconds(s, "rebased_backward", rotation, c.repeats, backward);
  return row;
}

AttentionBenchRow time_module(const std::string& module, Stream& s, RandomTensors& random,
                              const Case& c) {
  if (module == "stickbreaking") return time_stickbreaking(s, random, c);
  if (module == "based" || module == "rebased") {
    return time_rebased(s, random, c, module == "rebased");
  }
  return SoftmaxBench(s, random, c, module).times();
}

void complete(AttentionBenchOptions& o, bool cuda) {
  if (o.tokens == 0) o.tokens = cuda ? 32768 : 1024;
  if (o.width == 0) o.width = cuda ? 1536 : 128;
  if (o.head_dims.empty()) o.head_dims = {32, 64, 128};
  if (o.lengths.empty()) {
    for (int64_t length = cuda ? 512 : 256; length <= (cuda ? 16384 : 1024); length *= 2) {
      o.lengths.push_back(length);
    }
  }
  for (const std::string& module : o.modules) {
    const auto& known = kBenchAttentionModules;
    if (std::find(known.begin(), known.end(), module) == known.end()) {
      fail(ExitCode::kUsage, "'{}' is not one of {}", module, fmt::join(known, ", "));
    }
  }
  for (const int64_t d : o.head_dims) {
    if (o.width % d != 0)
      fail(ExitCode::kUsage, "heads of {} do not divide a width of {}", d, o.width);
  }
  for (const int64_t length : o.lengths) {
    if (o.tokens % length != 0) {
      fail(ExitCode::kUsage, "documents of {} do not divide {} tokens", length, o.tokens);
    }
  }
}

}  // namespace

std::vector<AttentionBenchRow> bench_attention(Backend backend, AttentionBenchOptions options) {
  complete(options, backend == Backend::kCuda);
  Memory memory(backend);
  Stream stream(memory);
  stream.set_deterministic(options.deterministic);
  stream.set_implementation(options.implementation);
  RandomTensors random(stream);
  std::vector<AttentionBenchRow> rows;
  for (const std::string& module : options.modules) {
    for (const int64_t d : options.head_dims) {
      for (const int64_t length : options.lengths) {
        const Case c{.tokens = options.tokens,
                     .width = options.width,
                     .head_dim = d,
                     .length = length,
                     .repeats = options.repeats,
                     .skip_epsilon = static_cast<float>(options.skip_epsilon),
                     .window = options.window,
                     .quadratic = options.quadratic};
        AttentionBenchRow row = time_module(module, stream, random, c);
        row.module = module;
        row.head_dim = d;
        row.length = length;
        // Two products of L x L x d, of which the pairs that see each other count: 4 d L^2 / 2 for
        // each head and document without a window. The backward pass has five products of that
        // size for the forward pass's two. Based and ReBased are held against the same count:
        // rates say who is faster, not how busy a device is.
        const double window = module == "window" ? static_cast<double>(c.window) : 0.0;
        row.forward_flops = 4.0 * static_cast<double>(c.width) *
                            pairs(static_cast<double>(length), window) *
                            static_cast<double>(c.tokens) / static_cast<double>(length);
        row.backward_flops = 2.5 * row.forward_flops;
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

}  // namespace sbtrain
