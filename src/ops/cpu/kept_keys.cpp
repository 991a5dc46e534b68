#include "ops/kept_keys.h"

#include <algorithm>

#include "core/error.h"

namespace sbtrain::ops::cpu {
namespace {

using Matrix = kernels::Matrix<float>;

// What is not below the bound is kept, and what is no number with it.
bool keeps(const float* gates, int64_t group, float bound) {
  return std::any_of(gates, gates + group, [bound](float gate) { return !(gate < bound); });
}

float* page_of(const int64_t* of_head, int64_t row) {
  return reinterpret_cast<float*>(of_head[row / kPageKeys]);  // NOLINT: an address
}

}  // namespace

void run(Cpu, Stream& /*s*/, const KeepKeys& op) {
  const int64_t key_heads = op.rows_GT.rows();
  const int64_t group = op.gate_TH.cols() / key_heads;
  const int64_t tokens = op.gate_TH.rows();
  const Matrix gate = op.gate_TH;
  for (int64_t g = 0; g < key_heads; ++g) {
    int32_t count = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      const bool kept = keeps(gate.row(t) + g * group, group, op.bound);
      op.rows_GT.i32()[g * tokens + t] = kept ? count++ : -1;
    }
    op.counts_G.i32()[g] = count;
  }
}

void run(Cpu, Stream& /*s*/, const StoreKeys& op) {
  const kernels::KeyPages pages = key_pages(op.pages_1GM);
  const int64_t key_heads = op.pages_1GM.shape[1];
  const int64_t tokens = op.gate_TH.rows();
  const int64_t group = op.gate_TH.cols() / key_heads;
  const int64_t d = op.k_TGd.cols() / key_heads;
  const Matrix k = op.k_TGd, v = op.v_TGd, gate = op.gate_TH;
  for (int64_t g = 0; g < key_heads; ++g) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t row = op.rows_GT.i32()[g * tokens + t];
      if (row < 0) continue;
      require(row < pages.most * kPageKeys, "row {} of a prompt in {} pages", row, pages.most);
      float* const page = page_of(pages.of_head(0, g), row);
      const int64_t at = row % kPageKeys;
      std::copy_n(k.row(t) + g * d, d, page + at * d);
      std::copy_n(v.row(t) + g * d, d, page + (kPageKeys + at) * d);
      std::copy_n(gate.row(t) + g * group, group, page + 2 * kPageKeys * d + at * group);
    }
  }
}

void run(Cpu, Stream& /*s*/, const PlaceKeys& op) {
  const kernels::PlaceKeys p = op.kernel();
  const int64_t group = p.heads / p.key_heads;
  const Matrix gate = op.gate_BH;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t g = 0; g < p.key_heads; ++g) {
      int32_t& count = p.counts.row(b)[g];
      const int32_t row = p.positions[b] == 0 ? 0 : count;
      require(row >= 0 && row < p.pages.most * kPageKeys, "row {} of sequence {} in {} pages", row,
              b, p.pages.most);
      const float* const gates = gate.row(b) + g * group;
      float* const page = page_of(p.pages.of_head(b, g), row);
      std::copy_n(gates, group, page + 2 * kPageKeys * p.head_dim + row % kPageKeys * group);
      p.lengths[b * p.key_heads + g] = row + 1;
      count = row + (keeps(gates, group, p.bound) ? 1 : 0);
    }
  }
}

}  // namespace sbtrain::ops::cpu
