// A cache that drops keys: of the keys of each head, only those are kept that a gate of their own
// lets through (kernels/kept_keys.h has the layout).
//
// With a forget gate no query gives a key more than its gate, A_ij <= f_i, so that keys with small
// gates matter little to any query. The heads of queries that share a head of keys have a gate
// each; a key is dropped if all of them are below `bound`.
//
// Rows of a head are the keys that it keeps, in the order of the tokens. pages_BGM (i64) has the
// addresses of the pages of 64 rows, M of each head at most; those of rows that are read or written
// must be there. It may be a column range.
#pragma once

#include "kernels/kept_keys.h"
#include "ops/attention.h"

namespace sbtrain::ops {

inline constexpr int64_t kPageKeys = kernels::kPageKeys;
kernels::KeyPages key_pages(const Tensor& pages_BGM);

// For the T tokens of a prompt: the row in which the key of each is kept, or -1, and how many are.
struct KeepKeys {
  static constexpr std::string_view kName = "keep_keys";
  Tensor rows_GT;   // = i32
  Tensor counts_G;  // = i32
  Tensor gate_TH;   // f32
  float bound;
  void check() const;
  kernels::KeepKeys kernel() const {
    return {rows_GT,
            counts_G,
            gate_TH,
            bound,
            gate_TH.rows(),
            static_cast<int>(gate_TH.cols()),
            static_cast<int>(rows_GT.rows())};
  }
};

// Copies the keys, values and gates that KeepKeys keeps to their rows.
struct StoreKeys {
  static constexpr std::string_view kName = "store_keys";
  Tensor pages_1GM;
  Tensor rows_GT;
  Tensor k_TGd, v_TGd;
  Tensor gate_TH;
  void check() const;
  kernels::StoreKeys kernel() const;
};

// Makes room for the keys of one new token of each sequence, before StickBreakingKeptDecode: puts
// their gates into the rows after those that are kept. The next token's key takes the same row if
// this one is not kept. A token at position 0 begins a sequence.
struct PlaceKeys {
  static constexpr std::string_view kName = "place_keys";
  Tensor counts_BG;   // += i32: the keys that are kept, may be a column range
  Tensor lengths_BG;  // = i32: the rows with the new key, kept or not
  Tensor pages_BGM;
  Tensor gate_BH;
  Tensor positions_B;
  float bound;
  int head_dim;
  void check() const;
  kernels::PlaceKeys kernel() const;
};

// StickBreakingDecode against the rows [0, lengths_BG[b, g]) of each head, of which the last is the
// token's own, written by the op.
struct StickBreakingKeptDecode {
  static constexpr std::string_view kName = "stickbreaking_kept_decode";
  Tensor o_BHd;
  Tensor q_BHd;
  Tensor k_BGd, v_BGd;
  Tensor pages_BGM;
  Tensor remainder_bias_Hd{};
  Tensor lengths_BG;
  StickBreakingParams params;
  int64_t capacity() const { return pages_BGM.shape[2] * kPageKeys; }
  void check() const;
  void check_limits(const Target&) const { check_decode_heads(kName, q_BHd, params.heads); }
  Buffer scratch(const Stream& s) const;
};

namespace cpu {
void run(Cpu, Stream& s, const KeepKeys& op);
void run(Cpu, Stream& s, const StoreKeys& op);
void run(Cpu, Stream& s, const PlaceKeys& op);
void run(Cpu, Stream& s, const StickBreakingKeptDecode& op, const Buffer& scratch);
Buffer scratch(const Stream& s, const StickBreakingKeptDecode& op);
}  // namespace cpu
namespace cuda {
void run(Cuda, Stream& s, const StickBreakingKeptDecode& op, const Buffer& scratch);
}  // namespace cuda

}  // namespace sbtrain::ops
