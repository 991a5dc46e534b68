#include "attention/map.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "ops/attention.h"
#include "ops/memory.h"
#include "ops/rebased.h"

namespace sbtrain {
namespace {

std::vector<double> download(Stream& s, const Tensor& x) {
  const int64_t rows = x.rows();
  const Buffer dense = s.scratch("attention map", DType::kF32, {rows, x.cols()});
  ops::run(s, ops::Copy{.y = dense, .x = x});
  std::vector<float> values(static_cast<size_t>(x.numel()));
  ops::run(s, ops::CopyToHost{.host = values.data(), .x = dense});
  return {values.begin(), values.end()};
}

// Divides a row by its sum plus eps.
void normalise(std::vector<double>& row, double eps) {
  double sum = eps;
  for (const double x : row) sum += x;
  for (double& x : row) x /= sum;
}

double sigmoid(double z) {
  return 1.0 / (1.0 + std::exp(-z));
}

HostMatrix download_matrix(Stream& s, const Tensor& x) {
  HostMatrix matrix(x.rows(), x.cols());
  matrix.values = download(s, x);
  return matrix;
}

}  // namespace

HostMatrix download_head(Stream& s, const Tensor& x, int64_t heads, int64_t head) {
  const int64_t width = x.cols() / heads;
  return download_matrix(s, x.col_range(head * width, width));
}

LogitBias no_bias() {
  return [](int64_t /*j*/, int64_t /*i*/) { return 0.0; };
}

LogitBias alibi_bias(int64_t heads, int64_t head) {
  const double slope = ops::alibi_slope(static_cast<int>(heads), static_cast<int>(head));
  return [slope](int64_t j, int64_t i) { return -slope * static_cast<double>(j - i); };
}

HostFire download(Stream& s, const ops::FireTensors& fire) {
  return {.c_1 = download_matrix(s, fire.c_1),
          .m_1 = download_matrix(s, fire.m_1),
          .w1_K = download_matrix(s, fire.w1_K),
          .b1_K = download_matrix(s, fire.b1_K),
          .w2_HK = download_matrix(s, fire.w2_HK),
          .b2_H = download_matrix(s, fire.b2_H),
          .length = fire.length};
}

LogitBias fire_bias(const HostFire& fire, int64_t head) {
  const double c = std::abs(fire.c_1.values.front());
  const double length = std::abs(fire.m_1.values.front()) * fire.length;
  const double b2 = fire.b2_H.values[static_cast<size_t>(head)];
  return [=](int64_t j, int64_t i) {
    const auto psi = [&](double x) { return std::log(c * x + 1.0); };
    const auto position = static_cast<double>(j);
    const double u =
        psi(position - static_cast<double>(i)) / (psi(std::max(position, length)) + ops::kFireEps);
    double sum = b2;
    for (int64_t n = 0; n < ops::kFireHidden; ++n) {
      sum += fire.w2_HK.row(head)[n] * std::max(fire.w1_K.values[n] * u + fire.b1_K.values[n], 0.0);
    }
    return sum;
  };
}

FillWeights softmax_weights(HostMatrix q, HostMatrix k, const ops::SoftmaxParams& params,
                            LogitBias bias) {
  return [q = std::move(q), k = std::move(k), params, bias = std::move(bias)](
             int64_t j, std::vector<double>& row) {
    const int64_t first = params.window > 0 ? std::max<int64_t>(0, j - params.window + 1) : 0;
    double maximum = -std::numeric_limits<double>::infinity();
    for (int64_t i = first; i <= j; ++i) {
      row[i] = static_cast<double>(params.scale) * dot(q, j, k, i) + bias(j, i);
      maximum = std::max(maximum, row[i]);
    }
    for (int64_t i = first; i <= j; ++i) row[i] = std::exp(row[i] - maximum);
    normalise(row, 0.0);
    return 0.0;
  };
}

FillWeights stickbreaking_weights(HostMatrix q, HostMatrix k, HostMatrix gate,
                                  const ops::StickBreakingParams& params) {
  return [q = std::move(q), k = std::move(k), gate = std::move(gate), params](
             int64_t j, std::vector<double>& row) {
    double left = 1;  // of the stick
    for (int64_t i = params.attend_current ? j : j - 1; i >= 0; --i) {
      const double z = static_cast<double>(params.scale) * dot(q, j, k, i);
      const double f = gate.rows > 0 ? *gate.row(i) : 1.0;
      row[i] = f * sigmoid(z) * left;
      left *= (1.0 - f) + f * sigmoid(-z);  // 1 - f sigmoid(z), without cancellation
    }
    return left;
  };
}

FillWeights rebased_weights(HostMatrix q, HostMatrix k, const ops::RebasedParams& params) {
  return [q = std::move(q), k = std::move(k), params](int64_t j, std::vector<double>& row) {
    for (int64_t i = 0; i <= j; ++i) {
      const double x = static_cast<double>(params.scale) * dot(q, j, k, i);
      row[i] = params.constant + params.linear * x + params.square * x * x;
    }
    normalise(row, params.eps);
    return 0.0;
  };
}

AttentionMap make_map(int64_t tokens, const FillWeights& fill, bool with_remainder) {
  AttentionMap map;
  map.tokens = tokens;
  map.weights_TT.resize(static_cast<size_t>(tokens * tokens));
  std::vector<float> remainder(static_cast<size_t>(tokens));
#pragma omp parallel
  {
    std::vector<double> row(static_cast<size_t>(tokens));
#pragma omp for schedule(dynamic, 16)
    for (int64_t j = 0; j < tokens; ++j) {
      std::fill(row.begin(), row.end(), 0.0);
      remainder[static_cast<size_t>(j)] = static_cast<float>(fill(j, row));
      std::copy(row.begin(), row.end(), map.weights_TT.begin() + j * tokens);
    }
  }
  if (with_remainder) map.remainder_T = std::move(remainder);
  return map;
}

}  // namespace sbtrain
