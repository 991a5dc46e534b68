// Attention in fp64, written as it is defined, one pair of tokens after the other. It is slow and
// independent of src/; the backends are compared with it.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace sbtrain::test::oracle {

enum class Remainder : uint8_t { kNone, kValue, kBias };

// Tensors are [T, H, d] (k and v [T, H/group, d], gate [T, H], bias [H, d]); document n is
// [bounds[n], bounds[n+1]).
struct Problem {
  int64_t tokens = 0, heads = 1, head_dim = 1;
  int64_t group = 1;  // heads of queries that share a head of keys and values
  std::vector<int32_t> bounds;
  double scale = 1.0;
  std::vector<double> q, k, v;
  std::vector<double> dout;  // empty: no gradients
  // stick-breaking
  bool attend_current = false;
  Remainder remainder = Remainder::kNone;
  std::vector<double> gate;        // empty: 1
  std::vector<double> bias;        // with Remainder::kBias
  std::vector<double> drem;        // [H, T], of the remainder itself; empty: 0
  std::vector<int32_t> first_key;  // [H, T], relative to the document; empty: 0
  // softmax
  int64_t window = 0;
  std::vector<double> slopes;  // ALiBi, [H]; empty: none
  std::vector<double> fire;    // c, m, w1 [K], b1 [K], w2 [H, K], b2 [H]; empty: none
  double fire_length = 512;    // L0
};

struct Result {
  explicit Result(const Problem& p)
      : o(p.q.size()),
        row(static_cast<size_t>(p.heads * p.tokens)),
        dq(p.q.size()),
        dk(p.k.size()),
        dv(p.v.size()),
        dgate(p.gate.size()),
        dbias(p.bias.size()),
        dfire(p.fire.size()) {}
  std::vector<double> o;
  std::vector<double> row;  // [H, T]: the remainder, or log-sum-exp
  std::vector<double> dq, dk, dv, dgate, dbias, dfire;

  void add(const Result& other) {
    const auto sum = [](std::vector<double>& y, const std::vector<double>& x) {
      for (size_t i = 0; i < y.size(); ++i) y[i] += x[i];
    };
    sum(o, other.o);
    sum(row, other.row);
    sum(dq, other.dq);
    sum(dk, other.dk);
    sum(dv, other.dv);
    sum(dgate, other.dgate);
    sum(dbias, other.dbias);
    sum(dfire, other.dfire);
  }
};

// One query of one head; its keys are tokens [begin, end) of the pack.
struct Query {
  int64_t token, head, begin, end;
};

// The values of one query for each of its keys, from `begin` on. Stick-breaking keeps sigmoid(z)
// and sigmoid(-z) in place of z.
struct Keys {
  explicit Keys(const Problem& p)
      : z(p.tokens), a(p.tokens), sigma(p.tokens), complement(p.tokens) {}
  std::vector<double> z, a, sigma, complement;
};

inline size_t at(const Problem& p, int64_t token, int64_t head) {
  return static_cast<size_t>((token * p.heads + head) * p.head_dim);
}
// Of the key or value that head `head` of the queries reads.
inline size_t key_at(const Problem& p, int64_t token, int64_t head) {
  return static_cast<size_t>((token * (p.heads / p.group) + head / p.group) * p.head_dim);
}
// So many channels at a time: a loop of a known length needs no ends of its own, and with one sum
// each product would wait for the sum before it.
inline constexpr int64_t kTogether = 16;
inline double dot(const Problem& p, const std::vector<double>& a, size_t i,
                  const std::vector<double>& b, size_t j) {
  const double* const x = a.data() + i;
  const double* const y = b.data() + j;
  double sums[kTogether] = {};
  int64_t c = 0;
  for (; c + kTogether <= p.head_dim; c += kTogether) {
#pragma omp simd
    for (int64_t n = 0; n < kTogether; ++n) sums[n] += x[c + n] * y[c + n];
  }
  double sum = 0;
  for (const double part : sums) sum += part;
  for (; c < p.head_dim; ++c) sum += x[c] * y[c];
  return sum;
}
inline void axpy(const Problem& p, std::vector<double>& y, size_t i, double w,
                 const std::vector<double>& x, size_t j) {
  double* const to = y.data() + i;
  const double* const from = x.data() + j;
  int64_t c = 0;
  for (; c + kTogether <= p.head_dim; c += kTogether) {
#pragma omp simd
    for (int64_t n = 0; n < kTogether; ++n) to[c + n] += w * from[c + n];
  }
  for (; c < p.head_dim; ++c) to[c] += w * from[c];
}

// Calls body(query, keys, result) for all queries, which adds to the result. `inclusive`: a token
// is its own last key.
template <typename Body>
Result sum_over_queries(const Problem& p, bool inclusive, Body&& body) {
  std::vector<Query> queries;
  for (size_t n = 0; n + 1 < p.bounds.size(); ++n) {
    for (int64_t j = p.bounds[n]; j < p.bounds[n + 1]; ++j) {
      for (int64_t h = 0; h < p.heads; ++h) {
        int64_t begin = p.bounds[n];
        if (!p.first_key.empty()) begin += p.first_key[static_cast<size_t>(h * p.tokens + j)];
        if (p.window > 0) begin = std::max(begin, j - p.window + 1);
        const int64_t end = inclusive ? j + 1 : j;
        queries.push_back({j, h, std::min(begin, end), end});
      }
    }
  }
  Result total(p);
#pragma omp parallel if (p.tokens > 1000)
  {
    Result mine(p);
    Keys keys(p);
#pragma omp for schedule(dynamic, 64) nowait
    for (size_t i = 0; i < queries.size(); ++i) body(queries[i], keys, mine);
#pragma omp critical
    total.add(mine);
  }
  return total;
}

inline double gate_of(const Problem& p, int64_t token, int64_t head) {
  return p.gate.empty() ? 1.0 : p.gate[static_cast<size_t>(token * p.heads + head)];
}
inline double sigmoid(double z) {
  return 1.0 / (1.0 + std::exp(-z));
}
// sigmoid(z) and sigmoid(-z), neither of which cancels.
inline std::pair<double, double> both_sigmoids(double z) {
  const double e = std::exp(-std::abs(z));
  const double larger = 1.0 / (1.0 + e);
  return z < 0 ? std::pair(e * larger, larger) : std::pair(larger, e * larger);
}
// 1 - f sigmoid(z) without cancellation, by 1 - sigmoid(z), which is sigmoid(-z).
inline double keep(double complement, double f) {
  return (1.0 - f) + f * complement;
}

// The sigmoids and A of the keys of one query (A_ij = beta_ij prod_{i<k<j} (1 - beta_kj)); returns
// the remainder. When less than 1e-40 of the stick is left, the remaining keys on the left are
// removed from `x`, because they change nothing in fp64. With gates it has to be much less: the
// gradient of one that is open asks what the keys further left would get if it closed a little.
inline double break_stick(const Problem& p, Query& x, Keys& keys) {
  double left = 1;
  const double least = p.gate.empty() ? 1e-40 : 1e-280;
  const int64_t first = x.begin;
  for (int64_t i = x.end - 1; i >= first; --i) {
    if (left < least) {
      for (std::vector<double>* values : {&keys.a, &keys.sigma, &keys.complement}) {
        const auto begin = values->begin();
        std::copy(begin + i + 1 - first, begin + x.end - first, begin);
      }
      x.begin = i + 1;
      break;
    }
    const double f = gate_of(p, i, x.head);
    const double z = p.scale * dot(p, p.q, at(p, x.token, x.head), p.k, key_at(p, i, x.head));
    const auto [sigma, complement] = both_sigmoids(z);
    keys.sigma[i - x.begin] = sigma;
    keys.complement[i - x.begin] = complement;
    keys.a[i - x.begin] = f * sigma * left;
    left *= keep(complement, f);
  }
  return left;
}

// g_i = A_i (do.v_i - drem), dz_i = g_i - beta_i sum_{i'<=i} g_i'; with a gate
// dbeta_i = g_i / beta_i - sum_{i'<i} g_i' / (1 - beta_i), beta_i = f_i sigmoid(z_i).
inline void break_stick_backward(const Problem& p, const Query& x, const Keys& keys, double rem,
                                 Result& out) {
  const size_t row = at(p, x.token, x.head);
  double drem = p.drem.empty() ? 0.0 : p.drem[static_cast<size_t>(x.head * p.tokens + x.token)];
  if (p.remainder == Remainder::kValue) {
    drem += dot(p, p.dout, row, p.v, key_at(p, x.token, x.head));
    axpy(p, out.dv, key_at(p, x.token, x.head), rem, p.dout, row);
  }
  if (p.remainder == Remainder::kBias) {
    drem += dot(p, p.dout, row, p.bias, at(p, 0, x.head));
    axpy(p, out.dbias, at(p, 0, x.head), rem, p.dout, row);
  }
  double sum = 0;  // of g over the keys to the left of i
  for (int64_t i = x.begin; i < x.end; ++i) {
    const size_t key = key_at(p, i, x.head);
    const double g = keys.a[i - x.begin] * (dot(p, p.dout, row, p.v, key) - drem);
    const double sigma = keys.sigma[i - x.begin];
    double dz = g - sigma * (sum + g);
    if (!p.gate.empty()) {
      const double f = gate_of(p, i, x.head);
      const double complement = keys.complement[i - x.begin];
      const double kept = keep(complement, f);
      dz = (g - sum * f * sigma / kept) * complement;
      out.dgate[static_cast<size_t>(i * p.heads + x.head)] += g / f - sum * sigma / kept;
    }
    sum += g;
    axpy(p, out.dq, row, p.scale * dz, p.k, key);
    axpy(p, out.dk, key, p.scale * dz, p.q, row);
    axpy(p, out.dv, key, keys.a[i - x.begin], p.dout, row);
  }
}

inline Result stickbreaking(const Problem& p) {
  return sum_over_queries(p, p.attend_current, [&](Query x, Keys& keys, Result& out) {
    const double rem = break_stick(p, x, keys);
    const size_t row = at(p, x.token, x.head);
    for (int64_t i = x.begin; i < x.end; ++i) {
      axpy(p, out.o, row, keys.a[i - x.begin], p.v, key_at(p, i, x.head));
    }
    if (p.remainder == Remainder::kValue) {
      axpy(p, out.o, row, rem, p.v, key_at(p, x.token, x.head));
    }
    if (p.remainder == Remainder::kBias) axpy(p, out.o, row, rem, p.bias, at(p, 0, x.head));
    out.row[static_cast<size_t>(x.head * p.tokens + x.token)] = rem;
    if (!p.dout.empty()) break_stick_backward(p, x, keys, rem, out);
  });
}

// ---- Keys of other ranks (ops/far_keys.h): the first `queries` tokens see the last `keys` of
// other ones, p.k and p.v.

struct FarKeys {
  int64_t queries = 0, keys = 0;
  std::vector<double> before;  // stick-breaking, [H, T]: what is left of the stick, as log2
  std::vector<double> w;       // stick-breaking, [H, T]: the gradient of what the keys leave
};

// o, what is left in `row` (not its log2), dq, dk and dv are what these keys add; w becomes the
// gradient of what they find. p.attend_current, the remainder and documents mean nothing here.
inline Result far_stickbreaking(Problem p, FarKeys& far) {
  p.drem = far.w;
  const std::vector<double> dout = p.dout;
  std::vector<double> stick;
  for (const double log2_before : far.before) stick.push_back(std::exp2(log2_before));
  for (size_t i = 0; i < p.drem.size(); ++i) p.drem[i] *= stick[i];
  for (int64_t j = 0; j < p.tokens; ++j) {
    for (int64_t h = 0; h < p.heads; ++h) {
      double* const row = p.dout.data() + at(p, j, h);
      for (int64_t c = 0; c < p.head_dim; ++c) row[c] *= stick[h * p.tokens + j];
    }
  }
  Result out(p);
  Keys keys(p);
  for (int64_t h = 0; h < p.heads; ++h) {
    for (int64_t j = 0; j < far.queries; ++j) {
      Query x{j, h, p.tokens - far.keys, p.tokens};
      const size_t n = static_cast<size_t>(h * p.tokens + j), row = at(p, j, h);
      const double rem = break_stick(p, x, keys);
      double w = rem * far.w[n];
      for (int64_t i = x.begin; i < x.end; ++i) {
        const double a = keys.a[i - x.begin];
        axpy(p, out.o, row, stick[n] * a, p.v, key_at(p, i, h));
        w += a * dot(p, dout, row, p.v, key_at(p, i, h));
      }
      out.row[n] = stick[n] * rem;
      break_stick_backward(p, x, keys, rem, out);
      far.w[n] = w;
    }
  }
  return out;
}

// FIRE's bias for the query at position j of its document and the key at position i. With `out`,
// the gradients for dz are added to it.
inline double fire_bias(const Problem& p, int64_t head, double j, double i, double dz,
                        std::vector<double>* out) {
  const size_t heads = static_cast<size_t>(p.heads);
  const size_t units = (p.fire.size() - 2 - heads) / (2 + heads);
  const size_t w1 = 2, b1 = w1 + units, w2 = b1 + units + static_cast<size_t>(head) * units;
  const size_t b2 = 2 + 2 * units + heads * units + static_cast<size_t>(head);
  const double c = p.fire[0], m = p.fire[1];
  const double length = std::abs(m * p.fire_length);
  const double x = std::max(j, length);
  const double above = std::log(std::abs(c * (j - i)) + 1.0);
  const double below = std::log(std::abs(c * x) + 1.0) + 1e-6;
  const double u = above / below;
  double bias = p.fire[b2];
  double du = 0;
  for (size_t k = 0; k < units; ++k) {
    const double hidden = p.fire[w1 + k] * u + p.fire[b1 + k];
    if (hidden <= 0) continue;
    bias += p.fire[w2 + k] * hidden;
    if (out == nullptr) continue;
    (*out)[w2 + k] += dz * hidden;
    (*out)[w1 + k] += dz * p.fire[w2 + k] * u;
    (*out)[b1 + k] += dz * p.fire[w2 + k];
    du += dz * p.fire[w2 + k] * p.fire[w1 + k];
  }
  if (out == nullptr) return bias;
  (*out)[b2] += dz;
  const double sign_c = c > 0 ? 1 : -1;
  const double dabove_dc = sign_c * (j - i) / (std::abs(c * (j - i)) + 1.0);
  const double dbelow_dc = sign_c * x / (std::abs(c * x) + 1.0);
  (*out)[0] += du * (dabove_dc / below - above / (below * below) * dbelow_dc);
  if (length > j) {
    const double dbelow_dm =
        std::abs(c) / (std::abs(c * x) + 1.0) * p.fire_length * (m > 0 ? 1 : -1);
    (*out)[1] -= du * above / (below * below) * dbelow_dm;
  }
  return bias;
}

// The bias of the logit of a query and a key, given as tokens of the pack.
inline double position_bias(const Problem& p, int64_t head, int64_t token, int64_t key, double dz,
                            std::vector<double>* out) {
  if (!p.slopes.empty()) return -p.slopes[static_cast<size_t>(head)] * double(token - key);
  if (p.fire.empty()) return 0;
  const auto next = std::upper_bound(p.bounds.begin(), p.bounds.end(), token);
  const int64_t start = *(next - 1);
  return fire_bias(p, head, double(token - start), double(key - start), dz, out);
}

// dz_i = P_i (do.v_i - sum_i' P_i' do.v_i').
inline void softmax_backward(const Problem& p, const Query& x, Keys& keys, Result& out) {
  const size_t row = at(p, x.token, x.head);
  double mean = 0;
  for (int64_t i = x.begin; i < x.end; ++i) {
    keys.z[i - x.begin] = dot(p, p.dout, row, p.v, key_at(p, i, x.head));
    mean += keys.a[i - x.begin] * keys.z[i - x.begin];
  }
  for (int64_t i = x.begin; i < x.end; ++i) {
    const size_t key = key_at(p, i, x.head);
    const double weight = keys.a[i - x.begin];
    const double dz = weight * (keys.z[i - x.begin] - mean);
    position_bias(p, x.head, x.token, i, dz, &out.dfire);
    axpy(p, out.dq, row, p.scale * dz, p.k, key);
    axpy(p, out.dk, key, p.scale * dz, p.q, row);
    axpy(p, out.dv, key, weight, p.dout, row);
  }
}

inline Result softmax(const Problem& p) {
  return sum_over_queries(p, true, [&](const Query& x, Keys& keys, Result& out) {
    const size_t row = at(p, x.token, x.head);
    double maximum = -INFINITY;
    for (int64_t i = x.begin; i < x.end; ++i) {
      keys.z[i - x.begin] = p.scale * dot(p, p.q, row, p.k, key_at(p, i, x.head)) +
                            position_bias(p, x.head, x.token, i, 0.0, nullptr);
      maximum = std::max(maximum, keys.z[i - x.begin]);
    }
    double sum = 0;
    for (int64_t i = 0; i < x.end - x.begin; ++i) {
      keys.a[i] = std::exp(keys.z[i] - maximum);
      sum += keys.a[i];
    }
    for (int64_t i = x.begin; i < x.end; ++i) {
      keys.a[i - x.begin] /= sum;
      axpy(p, out.o, row, keys.a[i - x.begin], p.v, key_at(p, i, x.head));
    }
    out.row[static_cast<size_t>(x.head * p.tokens + x.token)] = maximum + std::log(sum);
    if (!p.dout.empty()) softmax_backward(p, x, keys, out);
  });
}

// The same keys for softmax attention: o and lse, [H, T], are those of other keys and become those
// of these as well; the gradients are for o and lse after them. Query 0 lies `distance` tokens
// behind row 0 of the keys.
inline Result far_softmax(const Problem& p, const FarKeys& far, int64_t distance,
                          std::vector<double>& o, std::vector<double>& lse) {
  Result out(p);
  for (int64_t h = 0; h < p.heads; ++h) {
    for (int64_t j = 0; j < far.queries; ++j) {
      const size_t n = static_cast<size_t>(h * p.tokens + j), row = at(p, j, h);
      int64_t begin = p.tokens - far.keys;
      if (p.window > 0) begin = std::max(begin, j + distance - p.window + 1);
      std::vector<double> z;
      double both = lse[n];
      for (int64_t i = begin; i < p.tokens; ++i) {
        z.push_back(p.scale * dot(p, p.q, row, p.k, key_at(p, i, h)));
        if (!p.slopes.empty()) z.back() -= p.slopes[h] * static_cast<double>(j + distance - i);
        const double larger = std::max(both, z.back());
        both = larger + std::log(std::exp(both - larger) + std::exp(z.back() - larger));
      }
      for (int64_t c = 0; c < p.head_dim; ++c) o[row + c] *= std::exp(lse[n] - both);
      lse[n] = both;
      for (int64_t i = begin; i < p.tokens; ++i) {
        axpy(p, o, row, std::exp(z[i - begin] - both), p.v, key_at(p, i, h));
      }
      const double delta = dot(p, p.dout, row, o, row);
      for (int64_t i = begin; i < p.tokens; ++i) {
        const size_t key = key_at(p, i, h);
        const double weight = std::exp(z[i - begin] - both);
        const double dz = weight * (dot(p, p.dout, row, p.v, key) - delta);
        axpy(p, out.dq, row, p.scale * dz, p.k, key);
        axpy(p, out.dk, key, p.scale * dz, p.q, row);
        axpy(p, out.dv, key, weight, p.dout, row);
      }
    }
  }
  return out;
}

}  // namespace sbtrain::test::oracle
