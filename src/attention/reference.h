// Attention in double precision on the host: the formulas with which modules state what they
// compute (Attention::reference) and show what a head attends to (attention/map.h). Everything is
// for one document, with positions from 0.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

struct HostMatrix {
  HostMatrix() = default;
  HostMatrix(int64_t rows, int64_t cols)
      : rows(rows), cols(cols), values(static_cast<size_t>(rows * cols)) {}
  double* row(int64_t r) { return values.data() + r * cols; }
  const double* row(int64_t r) const { return values.data() + r * cols; }
  HostMatrix columns(int64_t begin, int64_t count) const;
  int64_t rows = 0, cols = 0;
  std::vector<double> values;  // row by row
};

// A module's parameters by name; those of one dimension are one row.
using HostWeights = std::map<std::string, HostMatrix, std::less<>>;
const HostMatrix& at(const HostWeights& w, std::string_view name);

// a_j . b_i.
double dot(const HostMatrix& a, int64_t j, const HostMatrix& b, int64_t i);

// x w^T.
HostMatrix project(const HostMatrix& x, const HostMatrix& w);
// x w^T + b, if there is a weight that is called `bias`.
HostMatrix project(const HostMatrix& x, const HostWeights& w, std::string_view weight,
                   std::string_view bias);

// Normalises each of `groups` equal parts of a row: (x - mean) / sqrt(variance + eps) * w + b.
void layer_norm(HostMatrix& x, const HostMatrix& w, const HostMatrix& b, double eps,
                int64_t groups);

// Normalises the parts of a row that are as long as w: x / sqrt(mean(x^2) + eps) * w.
void rms_norm(HostMatrix& x, const HostMatrix& w, double eps);

// fill(j, row) writes what query j of one head gives to each key into `row` [T], which starts as
// zeros, and returns what the query gives to no key.
using FillWeights = std::function<double(int64_t j, std::vector<double>& row)>;

// The columns of head `head` of o [T, H*e] = sum_i A_ij v_i.
void mix_head(HostMatrix& o, int64_t heads, int64_t head, const HostMatrix& v,
              const FillWeights& fill);

}  // namespace sbtrain
