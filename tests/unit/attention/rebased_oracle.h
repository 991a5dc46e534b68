// Based and ReBased attention as they are defined, in double precision, with gradients.
#pragma once

#include <cmath>
#include <string>
#include <vector>

#include "ops/rebased.h"

namespace sbtrain::test {

struct RebasedCase {
  std::vector<int32_t> documents = {16};
  bool rebased = true;
  bool quadratic = false;
  int heads = 2;
  int64_t f = 16, e = 12;
  double mean = 0;  // of queries and keys
  int64_t tokens() const {
    int64_t sum = 0;
    for (const int32_t length : documents) sum += length;
    return sum;
  }
  std::vector<int32_t> bounds() const {
    std::vector<int32_t> all = {0};
    for (const int32_t length : documents) all.push_back(all.back() + length);
    return all;
  }
  std::string describe() const {
    std::string text = rebased ? "rebased" : "based";
    text += quadratic ? ", quadratic, documents" : ", chunked, documents";
    for (const int32_t length : documents) text += " " + std::to_string(length);
    return text + ", e " + std::to_string(e);
  }
  ops::RebasedParams params() const {
    return {.heads = heads,
            .scale = 1.0f / std::sqrt(static_cast<float>(f)),
            .constant = rebased ? 0.0f : 1.0f,
            .linear = rebased ? 0.0f : 1.0f,
            .square = rebased ? 1.0f : 0.5f,
            .quadratic = quadratic};
  }
};

struct RebasedResult {
  std::vector<double> o, den, dq, dk, dv;
};

// The definition itself, over all pairs, in fp64. With `saved_o`, gradients are formed with these
// outputs of a forward pass instead of the reference's own.
inline RebasedResult rebased_reference(const RebasedCase& c, const std::vector<double>& q,
                                       const std::vector<double>& k, const std::vector<double>& v,
                                       const std::vector<double>& dout,
                                       const std::vector<double>* saved_o = nullptr) {
  RebasedResult r;
  r.o.resize(v.size());
  r.den.resize(static_cast<size_t>(c.heads * c.tokens()));
  r.dq.resize(q.size());
  r.dk.resize(k.size());
  r.dv.resize(v.size());
  const std::vector<int32_t> bounds = c.bounds();
  const double scale = 1 / std::sqrt(static_cast<double>(c.f));
  const int64_t qs = c.heads * c.f;
  const int64_t vs = c.heads * c.e;
  for (size_t n = 0; n + 1 < bounds.size(); ++n) {
    for (int64_t j = bounds[n]; j < bounds[n + 1]; ++j) {
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t count = j + 1 - bounds[n];
        std::vector<double> x(count), s(count);
        double den = 1e-12;
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t a = 0; a < c.f; ++a) {
            x[i] += scale * q[j * qs + h * c.f + a] * k[(bounds[n] + i) * qs + h * c.f + a];
          }
          s[i] = c.rebased ? x[i] * x[i] : 1 + x[i] + x[i] * x[i] / 2;
          den += s[i];
        }
        r.den[h * c.tokens() + j] = den;
        double* o = &r.o[j * vs + h * c.e];
        const double* g = &dout[j * vs + h * c.e];
        double mean = 0;  // sum_i s_i / den do.v_i
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t b = 0; b < c.e; ++b) {
            const double value = v[(bounds[n] + i) * vs + h * c.e + b];
            o[b] += s[i] / den * value;
            mean += s[i] / den * value * g[b];
            r.dv[(bounds[n] + i) * vs + h * c.e + b] += s[i] / den * g[b];
          }
        }
        if (saved_o != nullptr) {
          mean = 0;
          for (int64_t b = 0; b < c.e; ++b) mean += (*saved_o)[j * vs + h * c.e + b] * g[b];
        }
        for (int64_t i = 0; i < count; ++i) {
          double ds = -mean / den;
          for (int64_t b = 0; b < c.e; ++b) {
            ds += v[(bounds[n] + i) * vs + h * c.e + b] * g[b] / den;
          }
          const double dx = scale * ds * (c.rebased ? 2 * x[i] : 1 + x[i]);
          for (int64_t a = 0; a < c.f; ++a) {
            const int64_t at_q = j * qs + h * c.f + a;
            const int64_t at_k = (bounds[n] + i) * qs + h * c.f + a;
            r.dq[at_q] += dx * k[at_k];
            r.dk[at_k] += dx * q[at_q];
          }
        }
      }
    }
  }
  return r;
}

}  // namespace sbtrain::test
