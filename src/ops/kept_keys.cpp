// Checks and scratch of ops on the keys that are kept.
#include "ops/kept_keys.h"

#include "kernels/scratch_sizes.h"

namespace sbtrain::ops {
namespace {

// Pages of `sequences` sequences; returns the heads of keys.
int64_t check_pages(const Check& c, const Tensor& pages_BGM, int64_t sequences) {
  c.that(pages_BGM.rank == 3 && pages_BGM.dtype == DType::kI64, "pages have three dimensions");
  c.that(pages_BGM.rows() == sequences, "there are pages for each sequence");
  return pages_BGM.shape[1];
}

void check_groups(const Check& c, const Tensor& gate, int64_t tokens, int64_t key_heads) {
  c.matrix("gate", gate, tokens, gate.cols());
  c.that(gate.dtype == DType::kF32, "gates are f32");
  c.that(key_heads > 0 && gate.cols() % key_heads == 0, "the heads of keys divide the gates");
}

}  // namespace

kernels::KeyPages key_pages(const Tensor& pages_BGM) {
  return {static_cast<const int64_t*>(pages_BGM.data), pages_BGM.row_stride, pages_BGM.shape[2]};
}

void KeepKeys::check() const {
  const Check c(kName);
  c.flat("rows_GT", rows_GT, rows_GT.rows() * gate_TH.rows(), DType::kI32);
  c.flat("counts_G", counts_G, rows_GT.rows(), DType::kI32);
  check_groups(c, gate_TH, gate_TH.rows(), rows_GT.rows());
}

void StoreKeys::check() const {
  const Check c(kName);
  const int64_t key_heads = check_pages(c, pages_1GM, 1);
  const int64_t tokens = gate_TH.rows();
  c.flat("rows_GT", rows_GT, key_heads * tokens, DType::kI32);
  check_groups(c, gate_TH, tokens, key_heads);
  c.heads("k_TGd", k_TGd, tokens, static_cast<int>(key_heads));
  c.same("v_TGd", v_TGd, k_TGd);
}

kernels::StoreKeys StoreKeys::kernel() const {
  const auto key_heads = static_cast<int>(pages_1GM.shape[1]);
  return {.pages = key_pages(pages_1GM),
          .rows = rows_GT,
          .k = k_TGd,
          .v = v_TGd,
          .gate = gate_TH,
          .tokens = gate_TH.rows(),
          .heads = static_cast<int>(gate_TH.cols()),
          .key_heads = key_heads,
          .head_dim = static_cast<int>(k_TGd.cols() / key_heads)};
}

void PlaceKeys::check() const {
  const Check c(kName);
  const int64_t sequences = gate_BH.rows();
  const int64_t key_heads = check_pages(c, pages_BGM, sequences);
  c.matrix("counts_BG", counts_BG, sequences, key_heads, DType::kI32);
  c.flat("lengths_BG", lengths_BG, sequences * key_heads, DType::kI32);
  check_groups(c, gate_BH, sequences, key_heads);
  c.flat("positions_B", positions_B, sequences, DType::kI32);
}

kernels::PlaceKeys PlaceKeys::kernel() const {
  return {.pages = key_pages(pages_BGM),
          .counts = counts_BG,
          .lengths = lengths_BG,
          .gate = gate_BH,
          .positions = positions_B,
          .bound = bound,
          .batch = gate_BH.rows(),
          .heads = static_cast<int>(gate_BH.cols()),
          .key_heads = static_cast<int>(pages_BGM.shape[1]),
          .head_dim = head_dim};
}

void StickBreakingKeptDecode::check() const {
  const Check c(kName);
  const int64_t sequences = q_BHd.rows();
  const int64_t d = c.heads("q_BHd", q_BHd, sequences, params.heads);
  c.same("o_BHd", o_BHd, q_BHd);
  const int64_t key_heads = check_pages(c, pages_BGM, sequences);
  c.that(key_heads > 0 && params.heads % key_heads == 0, "the heads of keys divide the heads");
  c.matrix("k_BGd", k_BGd, sequences, key_heads * d);
  c.same("v_BGd", v_BGd, k_BGd);
  c.flat("lengths_BG", lengths_BG, sequences * key_heads, DType::kI32);
  if (params.remainder == Remainder::kBias) {
    c.flat("remainder_bias_Hd", remainder_bias_Hd, q_BHd.cols());
  }
}

// On CUDA for as many rows as the pages can have, of which a head may have few.
Buffer StickBreakingKeptDecode::scratch(const Stream& s) const {
  if (!on_cuda(s)) return cpu::scratch(s, *this);
  const int64_t floats = kernels::decode_scratch_floats(q_BHd.rows(), params.heads,
                                                        q_BHd.cols() / params.heads, capacity());
  if (floats == 0) return {};
  return s.scratch("parts of keys", DType::kF32, {floats});
}

}  // namespace sbtrain::ops
