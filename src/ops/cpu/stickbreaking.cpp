// Stick-breaking attention of queries over the keys of their own documents (stickbreaking_tile.h).
#include "ops/cpu/stickbreaking_tile.h"

namespace sbtrain::ops::cpu {
namespace {

struct Head : HeadMatrices {
  template <typename Op>
  Head(const Op& t, int64_t index)
      : HeadMatrices(t, index),
        params(t.params),
        log2_rem(Matrix(t.log2_rem_HT).row(index)),
        stop(t.stop_HT.i32() + index * t.stop_HT.row_stride) {
    if (t.gate_TH.defined()) gate = Matrix(t.gate_TH).from(0, index);
    if (params.remainder == Remainder::kBias) bias = t.remainder_bias_Hd.f32() + index * d;
    if constexpr (std::is_same_v<Op, StickBreakingBackward>) {
      if (gate) dgate = Matrix(t.dgate_TH).from(0, index);
      if (bias) dbias = t.dremainder_bias_Hd.f32() + index * d;
      if (t.drem_HT.defined()) drem = Matrix(t.drem_HT).row(index);
    }
  }

  StickBreakingParams params;
  float* log2_rem;     // [T]
  int32_t* stop;       // [T]
  Matrix gate, dgate;  // [T, 1], if there is one
  float *bias = nullptr, *dbias = nullptr;
  const float* drem = nullptr;  // [T], if it is given
};

// The query of the tile for which `key` is the first key, going left: its stick is whole there.
int64_t starting_lane(const QueryTile& tile, int64_t key, bool attend_current) {
  return key - tile.first + (attend_current ? 0 : 1);
}

// Keys [begin, begin + keys) of the tile's document, from right to left: logits `z` become A. With
// kSave, stick_before and sigma_code are written too.
template <bool kGated, bool kSave>
void break_sticks(Sticks& sticks, float* z, const QueryTile& tile, int64_t begin, int64_t keys,
                  const Head& head, float* stick_before, float* sigma_code) {
  const int64_t token = tile.document.begin + begin;
  for (int64_t i = keys - 1; i >= 0; --i) {
    const int64_t lane = starting_lane(tile, begin + i, head.params.attend_current);
    if (lane >= 0 && lane < tile.count) sticks.length[lane] = 1.0;
    const float gate = kGated ? *head.gate.row(token + i) : 1.0f;
    float* before = kSave ? stick_before + i * kTile : nullptr;
    float* sigma = kSave ? sigma_code + i * kTile : nullptr;
    break_stick<kGated, kSave>(z + i * kTile, sticks.length.data(), gate, before, sigma);
  }
  // The first token of a document sees no key: all of its stick remains.
  if (begin == 0 && tile.first == 0 && !head.params.attend_current) sticks.length[0] = 1.0;
}

int64_t keys_end(const QueryTile& tile) {
  return tile.first + tile.count;
}

// Where the chunk that ends at `end` begins, not left of `stop`. A tile's first chunk reaches past
// the first key of its first query, so after it every query has started.
static_assert(kChunk > kTile);
int64_t chunk_begin(int64_t end, int64_t stop) {
  return std::max(stop, end - kChunk);
}

// Adds the remainder and writes the tile's output, rem and stop.
void finish_tile(const QueryTile& tile, const Head& head, const Sticks& sticks, const float* o,
                 int64_t stop) {
  const int64_t token = tile.document.begin + tile.first;
  for (int64_t q = 0; q < tile.count; ++q) {
    const auto rem = static_cast<float>(sticks.length[q]);
    head.log2_rem[token + q] = log2_of(sticks.length[q]);
    head.stop[token + q] = static_cast<int32_t>(stop);
    float* row = head.o.row(token + q);
    std::copy_n(o + q * head.d, head.d, row);
    if (head.params.remainder == Remainder::kNone) continue;
    const float* r = head.bias ? head.bias : head.v.row(token + q);
    for (int64_t c = 0; c < head.d; ++c) row[c] += rem * r[c];
  }
}

template <bool kGated>
void forward_tile(const QueryTile& tile, const Head& head, const ForwardScratch& m) {
  const int64_t d = head.d;
  const int64_t start = tile.document.begin;
  m.load(tile, head, head.params.scale);

  Sticks sticks;
  int64_t end = keys_end(tile);
  while (end > 0) {
    const int64_t begin = chunk_begin(end, 0);
    const int64_t keys = end - begin;
    pack(m.rows, head.k.from(start + begin, 0), keys, keys, d, 1.0f);
    score(m.z, m.rows, m.q_t, keys, d);
    break_sticks<kGated, false>(sticks, m.z, tile, begin, keys, head, nullptr, nullptr);
    pack(m.rows, head.v.from(start + begin, 0), keys, keys, d, 1.0f);
    mix(m.o, m.z, m.rows, keys, d);
    end = begin;
    if (sticks.all_below(head.params.skip_epsilon)) break;
  }
  finish_tile(tile, head, sticks, m.o, end);
}

// drem of each query, and the part of dv that comes from the remainder.
void backward_remainder(const QueryTile& tile, const Head& head, StickScratch& m) {
  const int64_t token = tile.document.begin + tile.first;
  m.drem.fill(0.0f);
  if (head.drem) std::copy_n(head.drem + token, tile.count, m.drem.begin());
  if (head.params.remainder == Remainder::kNone) return;
  for (int64_t q = 0; q < tile.count; ++q) {
    const float* dout = m.dout + q * head.d;
    const float* r = head.bias ? head.bias : head.v.row(token + q);
    m.drem[q] += dot(dout, r, head.d);
    if (head.bias) continue;
    float* dv = head.dv.row(token + q);
    const float rem = std::exp2(head.log2_rem[token + q]);
    for (int64_t c = 0; c < head.d; ++c) dv[c] += rem * dout[c];
  }
}

// Pass 1, right to left: sticks and sigmas, and dv.
template <bool kGated>
void backward_sticks(const QueryTile& tile, const Head& head, StickScratch& m, int64_t stop) {
  Sticks sticks;
  int64_t end = keys_end(tile);
  while (end > stop) {
    const int64_t begin = chunk_begin(end, stop);
    const int64_t keys = end - begin;
    const int64_t token = tile.document.begin + begin;
    pack(m.rows, head.k.from(token, 0), keys, keys, head.d, 1.0f);
    score(m.chunk, m.rows, m.q_t, keys, head.d);
    break_sticks<kGated, true>(sticks, m.chunk, tile, begin, keys, head,
                               m.stick_before + (begin - stop) * kTile,
                               m.sigma_code + (begin - stop) * kTile);
    scatter(head.dv.from(token, 0), m.chunk, m.dout, keys, head.d);
    end = begin;
  }
}

template <bool kGated>
void backward_tile(const QueryTile& tile, const Head& head, StickScratch& m) {
  const int64_t token = tile.document.begin + tile.first;
  m.load(tile, head, head.params.scale);

  backward_remainder(tile, head, m);
  backward_sticks<kGated>(tile, head, m, head.stop[token]);
  alignas(64) std::array<float, kTile> w{};
  backward_logits<kGated>(head, tile.document.begin, head.stop[token], keys_end(tile), w.data(), m);

  for (int64_t q = 0; q < tile.count; ++q) {
    float* const dq = head.dq.row(token + q);
    for (int64_t c = 0; c < head.d; ++c) dq[c] = m.dq[q * head.d + c] * head.params.query_factor;
  }
}

void backward_head(const Document& document, const Head& head, StickScratch& memory) {
  if (head.gate) zero(head.dgate.from(document.begin, 0), document.length, 1);
  for (int64_t first = 0; first < document.length; first += kTile) {
    const QueryTile tile{document, first, std::min(kTile, document.length - first)};
    if (head.gate) {
      backward_tile<true>(tile, head, memory);
    } else {
      backward_tile<false>(tile, head, memory);
    }
  }
}

// Computes all of one group of heads in one document. Only this call writes its dk, dv and dgate,
// head after head and tile after tile, so that the sums have one order.
void backward_document(const Document& document, std::span<const Head> group, StickScratch memory) {
  const Head& first = group.front();
  zero(first.dk.from(document.begin, 0), document.length, first.d);
  zero(first.dv.from(document.begin, 0), document.length, first.d);
  for (const Head& head : group) backward_head(document, head, memory);
}

}  // namespace

Buffer scratch(const Stream& s, const StickBreakingForward& op) {
  return thread_scratch(s, "stickbreaking forward", ForwardScratch::floats(head_dim(op)));
}

Buffer scratch(const Stream& s, const StickBreakingBackward& op) {
  return thread_scratch(s, "stickbreaking backward",
                        StickScratch::floats(head_dim(op), op.sequences.max_seqlen));
}

void run(Cpu, Stream& /*s*/, const StickBreakingForward& t, const Buffer& scratch) {
  const auto heads = make_heads<Head>(t);
  for_each_head(query_tiles_by_keys(t.sequences, t.q_THd.rows()), heads,
                [&](const QueryTile& tile, const Head& head) {
                  const ForwardScratch m{Scratch(scratch), head.d};
                  if (head.gate) {
                    forward_tile<true>(tile, head, m);
                  } else {
                    forward_tile<false>(tile, head, m);
                  }
                });
}

void run(Cpu, Stream& /*s*/, const StickBreakingBackward& t, const Buffer& scratch) {
  const auto heads = make_heads<Head>(t);
  const int64_t max_seqlen = t.sequences.max_seqlen;
  for_each_group(
      documents_by_length(t.sequences, t.q_THd.rows()), std::span(heads),
      queries_of_key(t.q_THd, t.k_THd), [&](const Document& document, std::span<const Head> group) {
        backward_document(document, group, {Scratch(scratch), group.front().d, max_seqlen});
      });
  if (t.params.remainder != Remainder::kBias) return;
#pragma omp parallel for
  for (int64_t h = 0; h < t.params.heads; ++h) {
    const Head& head = heads[h];
    add_vector_gradient(head.dbias, head.log2_rem, head.dout, t.q_THd.rows(), head.d);
  }
}

}  // namespace sbtrain::ops::cpu
