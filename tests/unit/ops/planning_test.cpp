// A plan holds all the memory that ops take, and what they compute in it is what they compute in
// memory of their own. The lists of ops here are complete: the headers of src/ops are read.
#include <cxxabi.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "core/device.h"
#include "core/error.h"
#include "ops/activation.h"
#include "ops/attention.h"
#include "ops/average.h"
#include "ops/coca.h"
#include "ops/embedding.h"
#include "ops/far_softmax.h"
#include "ops/fp8.h"
#include "ops/initialize.h"
#include "ops/kept_keys.h"
#include "ops/linear.h"
#include "ops/loss.h"
#include "ops/memory.h"
#include "ops/muon.h"
#include "ops/norm.h"
#include "ops/optimizer.h"
#include "ops/rebased.h"
#include "ops/rope.h"
#include "ops/sampling.h"
#include "ops/scale.h"
#include "ops/short_conv.h"

namespace sbtrain {
namespace {

constexpr int64_t kTokens = 48;
constexpr int64_t kWidth = 16;
constexpr int64_t kVocab = 64;

// "RmsNorm" for ops::RmsNorm.
template <typename Op>
std::string name_of_op() {
  char* text = abi::__cxa_demangle(typeid(Op).name(), nullptr, nullptr, nullptr);
  const std::string name = text;
  std::free(text);
  return name.substr(name.rfind(':') + 1);
}

// The ops that the headers declare: every struct whose first member is its kName.
std::set<std::string> declared_ops() {
  const std::regex op(R"(struct\s+(\w+)[^;{}]*\{\s*static constexpr std::string_view kName)");
  std::set<std::string> names;
  for (const auto& file : std::filesystem::directory_iterator(SBTRAIN_OPS_HEADERS)) {
    if (file.path().extension() != ".h") continue;
    std::ostringstream text;
    text << std::ifstream(file.path()).rdbuf();
    const std::string header = text.str();
    for (auto it = std::sregex_iterator(header.begin(), header.end(), op);
         it != std::sregex_iterator(); ++it) {
      names.insert((*it)[1]);
    }
  }
  return names;
}

struct Notes {
  std::vector<std::string> names;  // of the ops, in their order
  std::vector<std::string> bits;   // of all tensors, after each
};

// Tensors of one program, and ops on them. After each op all bits of all tensors are noted, unless
// the memory is that of a plan, in which ops do nothing.
class Ops {
 public:
  Ops(Memory& memory, const char* program) : stream(memory), scope_(memory, program) {}

  // Normal numbers with this standard deviation.
  Buffer matrix(int64_t rows, int64_t cols, double std = 0.5) {
    Buffer b = allocate(DType::kF32, {rows, cols});
    run(ops::Initialize{.x_N = b.tensor().reshaped({rows * cols}),
                        .begin = 0,
                        .rows = rows,
                        .cols = cols,
                        .stored_cols = cols,
                        .init = Init::normal(std),
                        .random = Philox(1, RandomPurpose::kTest, "tensor", tensors_.size())});
    return b;
  }
  Buffer vector(int64_t n) { return allocate(DType::kF32, {n}, 0.5f); }
  Buffer integers(const std::vector<int32_t>& values) {
    Buffer b = allocate(DType::kI32, {static_cast<int64_t>(values.size())});
    run(ops::CopyFromHost{.y = b, .host = values.data()});
    return b;
  }
  Buffer allocate(DType dtype, std::initializer_list<int64_t> shape, float value = 0) {
    Buffer b = stream.memory().allocate(MemoryClass::kActivations, "t", dtype, shape);
    run(ops::Fill{.x = b, .value = value});
    tensors_.push_back(b);
    return b;
  }

  template <typename Op>
  void run(const Op& op) {
    ops::run(stream, op);
    notes.names.push_back(name_of_op<Op>());
    if (!stream.planning()) notes.bits.push_back(all_bits());
  }

  Stream stream;
  Notes notes;

 private:
  std::string all_bits() const {
    std::string all;
    for (const Tensor& t : tensors_) all.append(static_cast<const char*>(t.data), t.bytes());
    return all;
  }
  ProgramScope scope_;
  std::vector<Tensor> tensors_;
};

// Those of products in fp8; `scales` are numbers for three, each in 16 bytes.
void run_every_fp8_op(Ops& o, const Tensor& y, const Tensor& x, const Tensor& w,
                      const Tensor& scales) {
  const Tensor amax = scales.row_range(0, 1), x_scale = scales.row_range(kFp8ScaleStride, 1);
  const Tensor w_scale = scales.row_range(2 * kFp8ScaleStride, 1);
  const auto fp8 = [&](const Tensor& like) {
    return o.stream.scratch("fp8", DType::kE4M3, {like.rows(), like.cols()});
  };
  const Buffer x_fp8 = fp8(x), w_fp8 = fp8(w);
  o.run(ops::Amax{.amax_1 = amax, .x_RC = x});
  o.run(ops::CastFp8{.y_RC = x_fp8, .inverse_scale_1 = x_scale, .x_RC = x, .amax_1 = amax});
  o.run(ops::Amax{.amax_1 = amax, .x_RC = w});
  o.run(ops::CastFp8{.y_RC = w_fp8, .inverse_scale_1 = w_scale, .x_RC = w, .amax_1 = amax});
  const Buffer w_turned = o.stream.scratch("fp8", DType::kE4M3, {w.cols(), w.rows()});
  o.run(ops::TransposeFp8{.y_CR = w_turned, .x_RC = w_fp8});
  o.run(ops::Fp8Scales{
      .amax_N = amax, .inverse_scale_N1 = w_scale.reshaped({1, 1}), .x_WN = amax.reshaped({1, 1})});
  o.run(ops::Fp8Product{.y_MN = y, .a_MK = {x_fp8, x_scale}, .b_NK = {w_fp8, w_scale}});
}

// Every op of training and of the model's products, norms and element-wise parts.
void run_every_op(Ops& o) {
  const Buffer x = o.matrix(kTokens, kWidth), y = o.matrix(kTokens, kWidth);
  const Buffer z = o.matrix(kTokens, kWidth), dx = o.matrix(kTokens, kWidth);
  const Buffer wide = o.matrix(kTokens, 2 * kWidth), dwide = o.matrix(kTokens, 2 * kWidth);
  const Buffer square = o.matrix(kWidth, kWidth), dsquare = o.matrix(kWidth, kWidth);
  const Buffer tall = o.matrix(2 * kWidth, kWidth);
  const Buffer row = o.vector(kWidth), drow = o.vector(kWidth), other_row = o.vector(kWidth);
  const Buffer head_row = o.vector(kWidth / 2), dhead_row = o.vector(kWidth / 2);
  const Buffer table = o.matrix(kVocab, kWidth), dtable = o.matrix(kVocab, kWidth);
  const Buffer losses = o.vector(kTokens), scales = o.vector(3 * kFp8ScaleStride);
  std::vector<int32_t> numbers(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) numbers[t] = static_cast<int32_t>(7 * t % kVocab);
  const Buffer ids = o.integers(numbers), chosen = o.integers(numbers);

  o.run(ops::Embedding{.y_TD = x, .tokens_T = ids, .w_VD = table, .scale = 1.0f});
  o.run(ops::RmsNorm{.y_TD = y, .x_TD = x, .w_D = row, .eps = 1e-5f});
  o.run(ops::RmsNormBackward{
      .dx_TD = dx, .dw_D = drow, .dy_TD = y, .x_TD = x, .w_D = row, .eps = 1e-5f});
  o.run(ops::HeadNorm{
      .y_THd = y, .x_THd = x, .w_Hd = row, .b_Hd = other_row, .heads = 2, .eps = 1e-5f});
  o.run(ops::HeadNormBackward{.dx_THd = dx,
                              .dw_Hd = drow,
                              .db_Hd = other_row,
                              .dy_THd = y,
                              .x_THd = x,
                              .w_Hd = row,
                              .heads = 2,
                              .eps = 1e-5f});
  o.run(ops::HeadRmsNorm{.y_THd = y, .x_THd = x, .w_d = head_row, .heads = 2, .eps = 1e-5f});
  o.run(ops::HeadRmsNormBackward{.dx_THd = dx,
                                 .dw_d = dhead_row,
                                 .dy_THd = y,
                                 .x_THd = x,
                                 .w_d = head_row,
                                 .heads = 2,
                                 .eps = 1e-5f});
  o.run(ops::LayerNorm{.y_TD = y, .x_TD = x, .w_D = row, .b_D = other_row, .eps = 1e-5f});
  o.run(ops::LayerNormBackward{.dx_TD = dx,
                               .dw_D = drow,
                               .db_D = other_row,
                               .dy_TD = y,
                               .x_TD = x,
                               .w_D = row,
                               .eps = 1e-5f,
                               .accumulate = true});
  o.run(ops::Linear{.y_TN = y, .x_TK = x, .w_NK = square, .residual = x});
  o.run(ops::DecodeLinear{
      .y_BN = y, .x_BK = x, .w_NK = square, .residual = z, .norm_K = row, .norm_eps = 1e-5f});
  o.run(ops::DecodeLinear{
      .y_BN = y, .x_BK = x, .w_NK = tall, .norm_K = row, .norm_eps = 1e-5f, .swiglu = true});
  o.run(ops::LinearBackward{.dx_TK = dx, .dy_TN = y, .w_NK = square});
  o.run(ops::LinearBackward{.dw_NK = dsquare, .dy_TN = y, .x_TK = x});
  o.run(ops::LinearBackward{.dx_TK = dx, .dw_NK = dsquare, .dy_TN = y, .x_TK = x, .w_NK = square});
  run_every_fp8_op(o, y, x, square, scales);
  o.run(ops::Scale{.y_TD = y, .x_TD = x, .w_D = row});
  o.run(ops::ScaleBackward{.dx_TD = dx, .dw_D = drow, .dy_TD = y, .x_TD = x, .w_D = row});
  o.run(ops::AddBias{.y_TN = y, .b_N = row});
  o.run(ops::BiasBackward{.db_N = drow, .dy_TN = y});
  o.run(ops::Swiglu{.y_TF = y, .gate_up_T2F = wide});
  o.run(ops::SwigluBackward{.dgate_up_T2F = dwide, .dy_TF = y, .gate_up_T2F = wide});
  o.run(ops::BiasGelu{.y_TF = y, .x_TF = x, .b_F = row});
  o.run(ops::BiasGeluBackward{.dx_TF = dx, .dy_TF = y, .x_TF = x, .b_F = row});
  o.run(ops::BiasSigmoid{.y_TH = y, .x_TH = x, .b_H = row});
  o.run(ops::SigmoidBackward{.dx_TH = dx, .dy_TH = z, .y_TH = y});
  const ops::RopeParams rope = {.heads = 2,
                                .frequencies = ops::rope_frequencies(10000, kWidth / 2)};
  o.run(ops::Rope{.x_THd = x, .positions_T = ids, .params = rope});
  o.run(ops::CrossEntropy{
      .loss_T = losses, .dx_TD = dx, .dw_VD = dtable, .x_TD = x, .w_VD = table, .targets_T = ids});
  o.run(ops::EmbeddingBackward{.dw_VD = dtable, .dy_TD = dx, .tokens_T = ids, .scale = 1.0f});
  o.run(ops::Argmax{.y_B = chosen, .x_BV = wide, .vocab = kWidth + 3});
  o.run(ops::Add{.y = x, .x = y});
  o.run(ops::Copy{.y = y, .x = z});
  o.run(ops::SumParts{.y_N = drow, .x_RN = square, .own_N = row, .own = 3});
  std::vector<float> host(kTokens);
  o.run(ops::CopyFromHost{.y = losses, .host = host.data()});
  o.run(ops::CopyToHost{.host = host.data(), .x = losses});
  o.run(ops::StartCopyToHost{.host = host.data(), .x = losses});
  o.run(ops::FetchFromHost{.y = losses, .host = host.data()});
  o.run(ops::Synchronize{});
}

// Every op of an optimizer's step.
void run_every_update(Ops& o) {
  const Buffer w = o.matrix(kVocab, kWidth), gradient = o.matrix(kVocab, kWidth, 0.01);
  const Buffer m = o.matrix(kVocab, kWidth, 0), v = o.matrix(kVocab, kWidth, 0);
  const Buffer small = o.vector(kWidth), small_gradient = o.vector(kWidth);
  const Buffer small_m = o.vector(kWidth), small_v = o.vector(kWidth);
  const Buffer losses = o.vector(kTokens);
  const Buffer stats = o.allocate(DType::kF64, {ops::kStepStats});
  const auto stat = [&](ops::StepStat i) { return stats.tensor().row_range(i, 1); };
  ops::sum(o.stream, losses);
  o.run(ops::Fill{.x = stat(ops::kValidTargets), .value = kTokens});
  o.run(ops::AddSum{.y_1 = stat(ops::kLossSum), .x = losses});
  o.run(ops::AddSquaredNorm{.y_1 = stat(ops::kSquaredNorm), .x = gradient});
  const std::vector<Tensor> gradients = {gradient, small_gradient};
  o.run(ops::AddSquaredNorms{.y_1 = stat(ops::kSquaredNorm), .x = gradients});
  o.run(ops::FinishStep{.stats = stats, .clip = 1, .beta1 = 0.9, .beta2 = 0.95});
  const ops::AdamW update = {
      .w_N = w, .m_N = m, .v_N = v, .grad_N = gradient, .stats = stats, .lr = 0.1f};
  o.run(update);
  const std::vector<ops::AdamW> updates = {update,
                                           {.w_N = small,
                                            .m_N = small_m,
                                            .v_N = small_v,
                                            .grad_N = small_gradient,
                                            .stats = stats,
                                            .lr = 0.1f}};
  o.run(ops::AdamWs{.ranges = updates});
  const Buffer direction = o.vector(kVocab * kWidth);
  o.run(ops::MuonMomentum{.y_N = direction,
                          .m_N = m,
                          .grad_N = gradient,
                          .stats = stats,
                          .momentum = 0.95f,
                          .nesterov = true});
  o.run(ops::Normalize{.y_N = direction, .x_N = direction, .margin = 1.02f});
  o.run(ops::Orthogonalize{.x_NK = direction.tensor().reshaped({kVocab, kWidth})});
  o.run(ops::MuonUpdate{
      .w_N = w, .y_N = direction, .stats = stats, .lr = 0.1f, .scale = 1, .decay = 0.1f});
  o.run(ops::AverageWeights{.a_N = m, .w_N = w, .stats = stats, .decay = 0.9f});
}

// Every op that mixes tokens: attention, the transforms of CoCA, the short convolution, and a step
// of decoding.
void run_every_mixer(Ops& o) {
  constexpr int kHeads = 2;
  std::vector<int32_t> counted(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) counted[t] = static_cast<int32_t>(t);
  const Buffer positions = o.integers(counted);
  const Buffer bounds = o.integers({0, kTokens});
  const Sequences sequences = {
      .cu_seqlens = bounds, .positions_T = positions, .count = 1, .max_seqlen = kTokens};
  const Buffer q = o.matrix(kTokens, kWidth), k = o.matrix(kTokens, kWidth);
  const Buffer v = o.matrix(kTokens, kWidth), out = o.matrix(kTokens, kWidth);
  const Buffer dq = o.matrix(kTokens, kWidth), dk = o.matrix(kTokens, kWidth);
  const Buffer dv = o.matrix(kTokens, kWidth), per_query = o.matrix(kHeads, kTokens);
  const Buffer stop = o.allocate(DType::kI32, {kHeads, kTokens});

  o.run(ops::StickBreakingForward{.o_THd = out,
                                  .log2_rem_HT = per_query,
                                  .stop_HT = stop,
                                  .q_THd = q,
                                  .k_THd = k,
                                  .v_THd = v,
                                  .sequences = sequences,
                                  .params = {.heads = kHeads}});
  o.run(ops::StickBreakingBackward{.dq_THd = dq,
                                   .dk_THd = dk,
                                   .dv_THd = dv,
                                   .do_THd = out,
                                   .log2_rem_HT = per_query,
                                   .stop_HT = stop,
                                   .q_THd = q,
                                   .k_THd = k,
                                   .v_THd = v,
                                   .sequences = sequences,
                                   .params = {.heads = kHeads}});
  const ops::FarKeys far = {.queries = kTokens / 2, .keys = kTokens - 1};
  const Buffer far_rem = o.matrix(kHeads, kTokens), far_gradient = o.matrix(kHeads, kTokens);
  const Buffer far_stop = o.allocate(DType::kI32, {kHeads, kTokens});
  o.run(ops::StickBreakingFarForward{.o_THd = out,
                                     .log2_rem_HT = far_rem,
                                     .stop_HT = far_stop,
                                     .before_HT = per_query,
                                     .q_THd = q,
                                     .k_THd = k,
                                     .v_THd = v,
                                     .far = far,
                                     .params = {.heads = kHeads}});
  o.run(ops::StickBreakingFarBackward{.dq_THd = dq,
                                      .dk_THd = dk,
                                      .dv_THd = dv,
                                      .w_HT = far_gradient,
                                      .do_THd = out,
                                      .before_HT = per_query,
                                      .log2_rem_HT = far_rem,
                                      .stop_HT = far_stop,
                                      .q_THd = q,
                                      .k_THd = k,
                                      .v_THd = v,
                                      .far = far,
                                      .params = {.heads = kHeads}});
  const Buffer sums = o.allocate(DType::kF32, {kTokens, kWidth});
  const Buffer bias_sums = o.allocate(DType::kF32, {kWidth});
  for (const auto remainder : {ops::Remainder::kValue, ops::Remainder::kBias}) {
    const ops::StickBreakingParams params = {.heads = kHeads, .remainder = remainder};
    o.run(ops::AddRemainder{.o_THd = sums,
                            .log2_rem_HT = far_rem,
                            .v_THd = v,
                            .remainder_bias_Hd = v.tensor().row_range(0, 1),
                            .params = params});
    o.run(ops::RemainderGradient{.w_HT = far_gradient,
                                 .do_THd = out,
                                 .v_THd = v,
                                 .remainder_bias_Hd = v.tensor().row_range(0, 1),
                                 .params = params});
    o.run(ops::AddRemainderBackward{.dv_THd = sums,
                                    .dremainder_bias_Hd = bias_sums,
                                    .do_THd = out,
                                    .log2_rem_HT = far_rem,
                                    .params = params});
  }
  for (const auto kind : {ops::PositionBias::kNone, ops::PositionBias::kAlibi}) {
    o.run(ops::SoftmaxFarForward{.o_THd = out,
                                 .lse_HT = per_query,
                                 .q_THd = q,
                                 .k_THd = k,
                                 .v_THd = v,
                                 .bias = {.kind = kind},
                                 .far = far,
                                 .distance = kTokens,
                                 .params = {.heads = kHeads}});
    o.run(ops::SoftmaxFarBackward{.dq_THd = dq,
                                  .dk_THd = dk,
                                  .dv_THd = dv,
                                  .do_THd = out,
                                  .o_THd = out,
                                  .lse_HT = per_query,
                                  .q_THd = q,
                                  .k_THd = k,
                                  .v_THd = v,
                                  .bias = {.kind = kind},
                                  .far = far,
                                  .distance = kTokens,
                                  .params = {.heads = kHeads}});
    o.run(ops::SoftmaxForward{.o_THd = out,
                              .lse_HT = per_query,
                              .q_THd = q,
                              .k_THd = k,
                              .v_THd = v,
                              .bias = {.kind = kind},
                              .sequences = sequences,
                              .params = {.heads = kHeads}});
    o.run(ops::SoftmaxBackward{.dq_THd = dq,
                               .dk_THd = dk,
                               .dv_THd = dv,
                               .do_THd = v,
                               .o_THd = out,
                               .lse_HT = per_query,
                               .q_THd = q,
                               .k_THd = k,
                               .v_THd = v,
                               .bias = {.kind = kind},
                               .sequences = sequences,
                               .params = {.heads = kHeads}});
  }
  o.run(ops::RebasedForward{.o_THe = out,
                            .den_HT = per_query,
                            .q_THf = q,
                            .k_THf = k,
                            .v_THe = v,
                            .sequences = sequences,
                            .params = {.heads = kHeads}});
  o.run(ops::RebasedBackward{.dq_THf = dq,
                             .dk_THf = dk,
                             .dv_THe = dv,
                             .do_THe = v,
                             .o_THe = out,
                             .den_HT = per_query,
                             .q_THf = q,
                             .k_THf = k,
                             .v_THe = v,
                             .sequences = sequences,
                             .params = {.heads = kHeads}});
  const ops::CocaParams coca = {
      .rope = {.heads = kHeads,
               .frequencies = ops::rope_frequencies(10000, q.tensor().cols() / kHeads)}};
  o.run(ops::CocaQuery{.y_THd = out, .q_THd = q, .positions_T = positions, .params = coca});
  o.run(ops::CocaQueryBackward{
      .dq_THd = dq, .dy_THd = out, .q_THd = q, .positions_T = positions, .params = coca});
  o.run(ops::CocaKey{.y_THd = out, .t_THd = k, .positions_T = positions, .params = coca});
  o.run(ops::CocaKeyBackward{
      .dt_THd = dk, .dy_THd = v, .y_THd = out, .positions_T = positions, .params = coca});
  const Buffer taps = o.matrix(kWidth, ops::kShortConv), row = o.matrix(1, kWidth);
  const Buffer dtaps = o.matrix(kWidth, ops::kShortConv), drow = o.matrix(1, kWidth);
  const Buffer dgate_bias = o.matrix(1, kWidth);
  const ops::ShortConvWeights w = {.w_D3 = taps, .b_D = row, .gate_bias_D = row};
  const ops::ShortConvWeights dw = {.w_D3 = dtaps, .b_D = drow, .gate_bias_D = dgate_bias};
  o.run(ops::ShortConvForward{
      .y_TD = out, .u_TD = q, .gate_TD = k, .positions_T = positions, .w = w});
  o.run(ops::ShortConvBackward{.du_TD = dq,
                               .dgate_TD = dk,
                               .dy_TD = out,
                               .u_TD = q,
                               .gate_TD = k,
                               .positions_T = positions,
                               .dw = dw,
                               .w = w});

  const Tensor one = q.tensor().row_range(0, 1), new_o = out.tensor().row_range(0, 1);
  const Tensor cache = k.tensor().reshaped({1, kTokens, kWidth});
  const Buffer length = o.integers({kTokens}), position = o.integers({3});
  o.run(ops::CacheAppend{.cache_BCN = cache, .x_BN = one, .positions_B = position});
  o.run(ops::StickBreakingDecode{.o_BHd = new_o,
                                 .q_BHd = one,
                                 .k_cache_BCGd = cache,
                                 .v_cache_BCGd = cache,
                                 .lengths_B = length,
                                 .params = {.heads = kHeads}});
  o.run(ops::SoftmaxDecode{.o_BHd = new_o,
                           .q_BHd = one,
                           .k_cache_BCGd = cache,
                           .v_cache_BCGd = cache,
                           .lengths_B = length,
                           .params = {.heads = kHeads}});
  constexpr int64_t kHeadDim = kWidth / kHeads;
  const ops::RebasedParams params = {.heads = kHeads};
  const Buffer state = o.matrix(kHeads * ops::rebased_state_rows(kHeadDim, params), kHeadDim + 1);
  o.run(ops::RebasedState{.state_Re = state, .k_THf = k, .v_THe = v, .params = params});
  o.run(ops::RebasedDecode{.o_BHe = new_o,
                           .q_BHf = one,
                           .k_BHf = one,
                           .v_BHe = one,
                           .state_BRe = state,
                           .positions_B = position,
                           .params = params});
  const Buffer before = o.matrix(1, 2 * kWidth);
  o.run(ops::ShortConvDecode{.y_BD = new_o,
                             .u_BD = one,
                             .gate_BD = one,
                             .state_B2D = before,
                             .positions_B = position,
                             .w = w});
}

// Their tensors but the addresses of pages, which are those of the pool.
void run_every_op_on_kept_keys(Ops& o) {
  constexpr int64_t kTokens = 70, kHeads = 4, kKeyHeads = 2, kHeadDim = 5, kPages = 2;
  const Buffer q = o.matrix(kTokens, kHeads * kHeadDim);
  const Buffer k = o.matrix(kTokens, kKeyHeads * kHeadDim);
  const Buffer v = o.matrix(kTokens, kKeyHeads * kHeadDim);
  const Buffer gate = o.matrix(kTokens, kHeads);
  const Buffer rows = o.allocate(DType::kI32, {kKeyHeads, kTokens});
  const Buffer counts = o.allocate(DType::kI32, {1, kKeyHeads});
  const Buffer lengths = o.allocate(DType::kI32, {1, kKeyHeads});
  const Buffer positions = o.integers({static_cast<int32_t>(kTokens)});
  constexpr int64_t kFloats =
      kernels::page_bytes(kHeadDim, sizeof(float), kHeads / kKeyHeads) / int64_t{sizeof(float)};
  const Buffer memory = o.allocate(DType::kF32, {kKeyHeads * kPages, kFloats});
  const Buffer pages = o.stream.memory().allocate(MemoryClass::kActivations, "t", DType::kI64,
                                                  {1, kKeyHeads, kPages});
  std::vector<int64_t> addresses;
  for (int64_t i = 0; i < kKeyHeads * kPages; ++i) {
    addresses.push_back(reinterpret_cast<int64_t>(memory.tensor().data) +
                        i * kFloats * int64_t{sizeof(float)});
  }
  ops::run(o.stream, ops::CopyFromHost{.y = pages, .host = addresses.data()});

  o.run(ops::KeepKeys{.rows_GT = rows, .counts_G = counts, .gate_TH = gate, .bound = 0.1f});
  o.run(
      ops::StoreKeys{.pages_1GM = pages, .rows_GT = rows, .k_TGd = k, .v_TGd = v, .gate_TH = gate});
  const auto last = [](const Tensor& x) { return x.row_range(kTokens - 1, 1); };
  o.run(ops::PlaceKeys{.counts_BG = counts,
                       .lengths_BG = lengths,
                       .pages_BGM = pages,
                       .gate_BH = last(gate),
                       .positions_B = positions,
                       .bound = 0.1f,
                       .head_dim = kHeadDim});
  o.run(ops::StickBreakingKeptDecode{.o_BHd = q.tensor().row_range(0, 1),
                                     .q_BHd = last(q),
                                     .k_BGd = last(k),
                                     .v_BGd = last(v),
                                     .pages_BGM = pages,
                                     .lengths_BG = lengths,
                                     .params = {.heads = kHeads}});
}

struct Program {
  const char* name;
  void (*run)(Ops&);
};
constexpr Program kPrograms[] = {{"ops", run_every_op},
                                 {"update", run_every_update},
                                 {"mixers", run_every_mixer},
                                 {"kept keys", run_every_op_on_kept_keys}};

Notes run_in(Memory& memory, const Program& program) {
  Ops o(memory, program.name);
  program.run(o);
  return std::move(o.notes);
}

TEST(Planning, NoOpOfTheHeadersIsMissing) {
  std::set<std::string> ran;
  for (const Program& program : kPrograms) {
    Memory plan(Backend::kPlan);
    const Notes notes = run_in(plan, program);
    ran.insert(notes.names.begin(), notes.names.end());
  }
  EXPECT_EQ(ran, declared_ops()) << "every op of src/ops/*.h belongs to one of the programs above";
}

// A plan places the tensors and the scratch of ops in one pool. If an op takes memory that is not
// its scratch, running in the pool throws; if its scratch is too small, or lies on a tensor, bits
// differ.
TEST(Planning, OpsGiveTheSameBitsInThePlannedPool) {
  for (const Program& program : kPrograms) {
    Memory plan(Backend::kPlan);
    run_in(plan, program);
    ASSERT_EQ(plan.report().programs.size(), 1u);
    Memory free(Backend::kCpu);
    free.poison();
    const Notes expected = run_in(free, program);
    Memory memory(Backend::kCpu);
    memory.adopt_plan(plan);
    for (int run = 0; run < 2; ++run) {
      const Notes actual = run_in(memory, program);
      ASSERT_EQ(actual.names, expected.names);
      ASSERT_EQ(actual.bits.size(), actual.names.size());
      for (size_t i = 0; i < actual.bits.size(); ++i) {
        ASSERT_TRUE(actual.bits[i] == expected.bits[i]) << "op " << i << ", " << actual.names[i];
      }
    }
  }
}

Buffer activations(Memory& memory, DType dtype, std::initializer_list<int64_t> shape) {
  return memory.allocate(MemoryClass::kActivations, "t", dtype, shape);
}

TEST(Planning, LogitsAppearUnderTheirClass) {
  Memory plan(Backend::kPlan);
  {
    const ProgramScope program(plan, "loss");
    Stream s(plan);
    const Buffer x = activations(plan, DType::kF32, {4096, 8});
    const Buffer w = activations(plan, DType::kF32, {32768, 8});
    const Buffer loss = activations(plan, DType::kF32, {4096});
    const Buffer ids = activations(plan, DType::kI32, {4096});
    ops::run(s, ops::CrossEntropy{.loss_T = loss, .x_TD = x, .w_VD = w, .targets_T = ids});
  }
  const auto logits = plan.report().programs[0].at_peak[static_cast<int>(MemoryClass::kLogits)];
  EXPECT_EQ(logits, size_t{64} * 32768 * 4);
}

TEST(Planning, ABuildWithoutCudaSaysSo) {
  if (has_cuda()) GTEST_SKIP() << "this build has the CUDA backend";
  Memory memory(Backend::kCuda);
  Stream s(memory);
  try {
    ops::run(s, ops::Fill{.x = Tensor(nullptr, DType::kF32, {1}), .value = 0});
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "fill: this build has no cuda backend");
  }
}

}  // namespace
}  // namespace sbtrain
