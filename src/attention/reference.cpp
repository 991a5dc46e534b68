#include "attention/reference.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace sbtrain {

HostMatrix HostMatrix::columns(int64_t begin, int64_t count) const {
  HostMatrix part(rows, count);
  for (int64_t r = 0; r < rows; ++r) std::copy_n(row(r) + begin, count, part.row(r));
  return part;
}

const HostMatrix& at(const HostWeights& w, std::string_view name) {
  const auto found = w.find(name);
  require(found != w.end(), "there is no weight '{}'", name);
  return found->second;
}

double dot(const HostMatrix& q, int64_t j, const HostMatrix& k, int64_t i) {
  const double* a = q.row(j);
  const double* b = k.row(i);
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < q.cols; ++c) sum += a[c] * b[c];
  return sum;
}

HostMatrix project(const HostMatrix& x, const HostMatrix& w) {
  HostMatrix y(x.rows, w.rows);
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t n = 0; n < w.rows; ++n) y.row(t)[n] = dot(x, t, w, n);
  }
  return y;
}

HostMatrix project(const HostMatrix& x, const HostWeights& w, std::string_view weight,
                   std::string_view bias) {
  HostMatrix y = project(x, at(w, weight));
  const auto found = w.find(bias);
  if (found == w.end()) return y;
  for (int64_t t = 0; t < y.rows; ++t) {
    for (int64_t n = 0; n < y.cols; ++n) y.row(t)[n] += found->second.values[n];
  }
  return y;
}

void layer_norm(HostMatrix& x, const HostMatrix& w, const HostMatrix& b, double eps,
                int64_t groups) {
  const int64_t n = x.cols / groups;
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t begin = 0; begin < x.cols; begin += n) {
      double* part = x.row(t) + begin;
      double mean = 0, variance = 0;
      for (int64_t i = 0; i < n; ++i) mean += part[i] / static_cast<double>(n);
      for (int64_t i = 0; i < n; ++i) {
        variance += (part[i] - mean) * (part[i] - mean) / static_cast<double>(n);
      }
      for (int64_t i = 0; i < n; ++i) {
        part[i] = (part[i] - mean) / std::sqrt(variance + eps) * w.values[begin + i] +
                  b.values[begin + i];
      }
    }
  }
}

void rms_norm(HostMatrix& x, const HostMatrix& w, double eps) {
  const auto n = static_cast<int64_t>(w.values.size());
  for (int64_t t = 0; t < x.rows; ++t) {
    for (int64_t begin = 0; begin < x.cols; begin += n) {
      double* part = x.row(t) + begin;
      double squares = 0;
      for (int64_t i = 0; i < n; ++i) squares += part[i] * part[i] / static_cast<double>(n);
      for (int64_t i = 0; i < n; ++i) part[i] *= w.values[i] / std::sqrt(squares + eps);
    }
  }
}

void mix_head(HostMatrix& o, int64_t heads, int64_t head, const HostMatrix& v,
              const FillWeights& fill) {
  const int64_t e = v.cols / heads;
  std::vector<double> row(static_cast<size_t>(v.rows));
  for (int64_t j = 0; j < v.rows; ++j) {
    std::fill(row.begin(), row.end(), 0.0);
    fill(j, row);
    double* out = o.row(j) + head * e;
    for (int64_t i = 0; i < v.rows; ++i) {
      for (int64_t c = 0; c < e; ++c) out[c] += row[i] * v.row(i)[head * e + c];
    }
  }
}

}  // namespace sbtrain
