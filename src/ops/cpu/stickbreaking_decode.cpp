// Stick-breaking attention of one new token of each sequence over the keys that a cache holds, from
// the nearest to the farthest.
#include "ops/cpu/stickbreaking_tile.h"
#include "ops/kept_keys.h"

namespace sbtrain::ops::cpu {
namespace {

// logits become the sigma code of break_stick.
void encode_sigma(float* z) {
#pragma omp simd
  for (int64_t i = 0; i < kTile; ++i) {
    const float magnitude = simd::abs(z[i]);
    const float e = simd::exp(magnitude < kLargestLogit ? -magnitude : -kLargestLogit);
    const float small = e / (1.0f + e);
    z[i] = z[i] > 0.0f ? -small : small;
  }
}

// One head of keys of one sequence, whose rows lie in pages.
struct PagedHead {
  PagedHead(const StickBreakingKeptDecode& t, int64_t sequence, int64_t head)
      : index(head),
        d(t.q_BHd.cols() / t.params.heads),
        group(t.params.heads / t.pages_BGM.shape[1]),
        key_head(head / group),
        length(t.lengths_BG.i32()[sequence * t.pages_BGM.shape[1] + key_head]),
        q(Matrix(t.q_BHd).from(sequence, head * d).data),
        o(Matrix(t.o_BHd).from(sequence, head * d).data),
        own_k(Matrix(t.k_BGd).from(sequence, key_head * d).data),
        own_v(Matrix(t.v_BGd).from(sequence, key_head * d).data),
        pages(key_pages(t.pages_BGM).of_head(sequence, key_head)) {
    require(length > 0 && length <= t.capacity(), "sequence {} keeps {} keys in pages for {}",
            sequence, length, t.capacity());
  }
  float* page(int64_t i) const {
    return reinterpret_cast<float*>(pages[i / kPageKeys]);  // NOLINT: pages are given as addresses
  }
  float* k_row(int64_t i) const { return page(i) + i % kPageKeys * d; }
  float* v_row(int64_t i) const { return k_row(i) + kPageKeys * d; }
  // Of heads of keys, the first head of queries writes the token's own row.
  void append() const {
    if (index % group != 0) return;
    std::copy_n(own_k, d, k_row(length - 1));
    std::copy_n(own_v, d, v_row(length - 1));
  }

  double gate_of(int64_t i) const {
    return (page(i) + 2 * kPageKeys * d)[i % kPageKeys * group + index % group];
  }
  const float* own_value() const { return own_v; }
  // Rows are copied to neighbouring ones, so that the arithmetic is that of a cache without pages.
  void logits(float* z, int64_t begin, int64_t keys, float scale) const {
    for (int64_t i = 0; i < keys; ++i) std::copy_n(k_row(begin + i), d, tile + i * d);
    skinny_gemm(1, keys, d, scale, q, d, tile, d, false, z, keys);
  }
  void add_values(float* y, int64_t begin, int64_t keys, const float* weights) const {
    for (int64_t i = 0; i < keys; ++i) std::copy_n(v_row(begin + i), d, tile + i * d);
    cpu::add_values(y, {tile, d}, d, keys, weights);
  }
  int64_t index;  // of the head of queries
  int64_t d;
  int64_t group, key_head;
  int64_t length;  // number of keys, the new token's included
  const float* q;
  float* o;
  const float *own_k, *own_v;
  const int64_t* pages;
  float* tile = nullptr;  // [kTile, d], the thread's
};

// Computes one head of the new token of one sequence against its cache, from right to left.
template <typename Op, typename Head>
void decode_head(const Op& t, const Head& cached) {
  const StickBreakingParams& params = t.params;
  float* o = cached.o;
  std::fill_n(o, cached.d, 0.0f);
  double stick = 1.0;
  alignas(64) std::array<float, kTile> code{};
  std::array<float, kTile> weights{};
  int64_t end = params.attend_current ? cached.length : cached.length - 1;
  while (end > 0 && !(stick < params.skip_epsilon)) {
    const int64_t begin = std::max<int64_t>(0, end - kTile);
    cached.logits(code.data(), begin, end - begin, params.scale);
    encode_sigma(code.data());
    for (int64_t i = end - 1; i >= begin; --i) {
      const Sigma sigma = decode_sigma(code[i - begin]);
      const double gate = cached.gate_of(i);
      const double beta = gate * sigma.value;
      weights[i - begin] = static_cast<float>(beta * stick);
      // 1 - sigma from the code: decode_sigma rounds one of the two to fp32.
      const double complement = sigma.value > 0.5f ? sigma.complement : 1.0 - sigma.value;
      stick *= (1.0 - gate) + gate * complement;
    }
    cached.add_values(o, begin, end - begin, weights.data());
    end = begin;
  }
  if (params.remainder == Remainder::kNone) return;
  const float* r = params.remainder == Remainder::kBias
                       ? t.remainder_bias_Hd.f32() + cached.index * cached.d
                       : cached.own_value();
  for (int64_t c = 0; c < cached.d; ++c) o[c] += static_cast<float>(stick) * r[c];
}

}  // namespace

void run(Cpu, Stream& /*s*/, const StickBreakingDecode& t, const Buffer& /*scratch*/) {
  append_own(t);
  const std::vector<CachedHead> cached = make_cached_heads(t);
  for_each_cached_head(cached, [&](const CachedHead& head) { decode_head(t, head); });
}

Buffer scratch(const Stream& s, const StickBreakingKeptDecode& op) {
  return thread_scratch(s, "keys of a page", kTile * (op.q_BHd.cols() / op.params.heads));
}

void run(Cpu, Stream& /*s*/, const StickBreakingKeptDecode& t, const Buffer& scratch) {
  std::vector<PagedHead> heads;
  for (int64_t b = 0; b < t.q_BHd.rows(); ++b) {
    for (int64_t h = 0; h < t.params.heads; ++h) heads.emplace_back(t, b, h).append();
  }
  for_each_cached_head(heads, [&](PagedHead head) {
    head.tile = Scratch(scratch).take(kTile * head.d);
    decode_head(t, head);
  });
}

}  // namespace sbtrain::ops::cpu
