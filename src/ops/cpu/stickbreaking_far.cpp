// Stick-breaking attention over keys of other ranks (ops/far_keys.h), a rectangle in which every
// query sees every key, and the remainder, which is given away when all ranges have been seen.
#include "ops/cpu/stickbreaking_tile.h"
#include "ops/far_keys.h"

namespace sbtrain::ops::cpu {
namespace {

struct FarHead : HeadMatrices {
  template <typename Op>
  FarHead(const Op& t, int64_t index)
      : HeadMatrices(t, index),
        params(t.params),
        keys(t.far.keys),
        before(Matrix(t.before_HT).row(index)),
        stop(t.stop_HT.i32() + index * t.stop_HT.row_stride) {
    const int64_t first = t.k_THd.rows() - keys;
    k = k.from(first, 0);
    v = v.from(first, 0);
    if (t.gate_TH.defined()) gate = Matrix(t.gate_TH).from(first, index);
    if constexpr (std::is_same_v<Op, StickBreakingFarBackward>) {
      dk = dk.from(first, 0);
      dv = dv.from(first, 0);
      if (gate) dgate = Matrix(t.dgate_TH).from(first, index);
      w = Matrix(t.w_HT).row(index);
    } else {
      log2_rem = Matrix(t.log2_rem_HT).row(index);
    }
  }
  // The sticks that a tile's queries bring to the range.
  Sticks sticks(const QueryTile& tile) const {
    Sticks left;
    for (int64_t q = 0; q < tile.count; ++q) {
      left.length[q] = std::exp2(static_cast<double>(before[tile.first + q]));
    }
    return left;
  }

  StickBreakingParams params;
  int64_t keys;
  Matrix gate, dgate;         // [keys, 1], if there is one
  const float* before;        // [T]
  int32_t* stop;              // [T]
  float* log2_rem = nullptr;  // [T], forward
  float* w = nullptr;         // [T], backward
};

template <bool kGated>
void far_forward_tile(const QueryTile& tile, const FarHead& head, const ForwardScratch& m) {
  m.load(tile, head, head.params.scale);
  Sticks sticks = head.sticks(tile);
  int64_t end = head.keys;
  while (end > 0 && !sticks.all_below(head.params.skip_epsilon)) {
    const int64_t begin = std::max<int64_t>(0, end - kChunk);
    const int64_t keys = end - begin;
    pack(m.rows, head.k.from(begin, 0), keys, keys, head.d, 1.0f);
    score(m.z, m.rows, m.q_t, keys, head.d);
    for (int64_t i = keys - 1; i >= 0; --i) {
      const float gate = kGated ? *head.gate.row(begin + i) : 1.0f;
      break_stick<kGated, false>(m.z + i * kTile, sticks.length.data(), gate, nullptr, nullptr);
    }
    pack(m.rows, head.v.from(begin, 0), keys, keys, head.d, 1.0f);
    mix(m.o, m.z, m.rows, keys, head.d);
    end = begin;
  }
  for (int64_t q = 0; q < tile.count; ++q) {
    const int64_t token = tile.first + q;
    head.log2_rem[token] = log2_of(sticks.length[q]);
    head.stop[token] = static_cast<int32_t>(end);
    float* row = head.o.row(token);
    for (int64_t c = 0; c < head.d; ++c) row[c] += m.o[q * head.d + c];
  }
}

// The same two passes as of own keys; W enters at the left edge, and leaves at the right one.
template <bool kGated>
void far_backward_tile(const QueryTile& tile, const FarHead& head, StickScratch& m) {
  m.load(tile, head, head.params.scale);
  Sticks sticks = head.sticks(tile);
  const int64_t stop = head.stop[tile.first];
  for (int64_t end = head.keys; end > stop;) {
    const int64_t begin = std::max(stop, end - kChunk);
    const int64_t keys = end - begin;
    pack(m.rows, head.k.from(begin, 0), keys, keys, head.d, 1.0f);
    score(m.chunk, m.rows, m.q_t, keys, head.d);
    for (int64_t i = keys - 1; i >= 0; --i) {
      const int64_t saved = (begin - stop + i) * kTile;
      const float gate = kGated ? *head.gate.row(begin + i) : 1.0f;
      break_stick<kGated, true>(m.chunk + i * kTile, sticks.length.data(), gate,
                                m.stick_before + saved, m.sigma_code + saved);
    }
    scatter(head.dv.from(begin, 0), m.chunk, m.dout, keys, head.d);
    end = begin;
  }
  alignas(64) std::array<float, kTile> w{};
  std::copy_n(head.w + tile.first, tile.count, w.begin());
  backward_logits<kGated>(head, 0, stop, head.keys, w.data(), m);
  std::copy_n(w.begin(), tile.count, head.w + tile.first);
  for (int64_t q = 0; q < tile.count; ++q) {
    float* const dq = head.dq.row(tile.first + q);
    for (int64_t c = 0; c < head.d; ++c) dq[c] += m.dq[q * head.d + c] * head.params.query_factor;
  }
}

// What receives the remainder of one head: the token's value, or the head's vector.
struct Receiver {
  template <typename Op>
  Receiver(const Op& t, int64_t index, int64_t d)
      : rows(t.params.remainder == Remainder::kBias
                 ? Matrix{t.remainder_bias_Hd.f32() + index * d, 0}
                 : Matrix(t.v_THd).from(0, index / (t.params.heads * d / t.v_THd.cols()) * d)) {}
  const float* row(int64_t token) const { return rows.row(token); }
  Matrix rows;
};

// The tiles of the queries that see the keys.
std::vector<QueryTile> far_tiles(const FarKeys& far) {
  std::vector<QueryTile> tiles;
  if (far.keys == 0) return tiles;
  for (int64_t first = 0; first < far.queries; first += kTile) {
    tiles.push_back({{0, far.queries}, first, std::min(kTile, far.queries - first)});
  }
  return tiles;
}

}  // namespace

Buffer scratch(const Stream& s, const StickBreakingFarForward& op) {
  return thread_scratch(s, "stickbreaking far forward", ForwardScratch::floats(head_dim(op)));
}

Buffer scratch(const Stream& s, const StickBreakingFarBackward& op) {
  return thread_scratch(s, "stickbreaking far backward",
                        StickScratch::floats(head_dim(op), op.k_THd.rows()));
}

void run(Cpu, Stream& /*s*/, const StickBreakingFarForward& t, const Buffer& scratch) {
  const auto heads = make_heads<FarHead>(t);
  for_each_head(far_tiles(t.far), heads, [&](const QueryTile& tile, const FarHead& head) {
    const ForwardScratch m{Scratch(scratch), head.d};
    head.gate ? far_forward_tile<true>(tile, head, m) : far_forward_tile<false>(tile, head, m);
  });
}

// One thread adds to the dk, dv and dgate of a group, tile after tile of head after head.
void run(Cpu, Stream& /*s*/, const StickBreakingFarBackward& t, const Buffer& scratch) {
  const auto heads = make_heads<FarHead>(t);
  const std::vector<QueryTile> tiles = far_tiles(t.far);
  const std::vector<Document> whole(tiles.empty() ? 0 : 1);
  for_each_group(whole, std::span(heads), queries_of_key(t.q_THd, t.k_THd),
                 [&](const Document&, std::span<const FarHead> group) {
                   StickScratch m(Scratch(scratch), group.front().d, t.k_THd.rows());
                   for (const FarHead& head : group) {
                     for (const QueryTile& tile : tiles) {
                       head.gate ? far_backward_tile<true>(tile, head, m)
                                 : far_backward_tile<false>(tile, head, m);
                     }
                   }
                 });
}

void run(Cpu, Stream& /*s*/, const AddRemainder& t) {
  const int64_t d = t.o_THd.cols() / t.params.heads;
#pragma omp parallel for
  for (int64_t h = 0; h < t.params.heads; ++h) {
    const Receiver receiver(t, h, d);
    const Matrix o = Matrix(t.o_THd).from(0, h * d);
    const float* log2_rem = Matrix(t.log2_rem_HT).row(h);
    for (int64_t j = 0; j < t.o_THd.rows(); ++j) {
      const float rem = std::exp2(log2_rem[j]);
      const float* x = receiver.row(j);
      for (int64_t c = 0; c < d; ++c) o.row(j)[c] += rem * x[c];
    }
  }
}

void run(Cpu, Stream& /*s*/, const RemainderGradient& t) {
  const int64_t d = t.do_THd.cols() / t.params.heads;
#pragma omp parallel for
  for (int64_t h = 0; h < t.params.heads; ++h) {
    const Receiver receiver(t, h, d);
    const Matrix dout = Matrix(t.do_THd).from(0, h * d);
    float* w = Matrix(t.w_HT).row(h);
    for (int64_t j = 0; j < t.do_THd.rows(); ++j) w[j] = dot(dout.row(j), receiver.row(j), d);
  }
}

// One thread adds to a head of values, or of vectors, from one head of queries after the other.
void run(Cpu, Stream& /*s*/, const AddRemainderBackward& t, const Buffer& /*scratch*/) {
  const int64_t tokens = t.do_THd.rows(), d = t.do_THd.cols() / t.params.heads;
  const bool to_vector = t.params.remainder == Remainder::kBias;
  const int64_t group = to_vector ? 1 : t.do_THd.cols() / t.dv_THd.cols();
#pragma omp parallel for
  for (int64_t first = 0; first < t.params.heads; first += group) {
    for (int64_t h = first; h < first + group; ++h) {
      const float* log2_rem = Matrix(t.log2_rem_HT).row(h);
      const Matrix dout = Matrix(t.do_THd).from(0, h * d);
      if (to_vector) {
        add_vector_gradient(t.dremainder_bias_Hd.f32() + h * d, log2_rem, dout, tokens, d);
        continue;
      }
      const Matrix dv = Matrix(t.dv_THd).from(0, h / group * d);
      for (int64_t j = 0; j < tokens; ++j) {
        const float rem = std::exp2(log2_rem[j]);
        for (int64_t c = 0; c < d; ++c) dv.row(j)[c] += rem * dout.row(j)[c];
      }
    }
  }
}

}  // namespace sbtrain::ops::cpu
