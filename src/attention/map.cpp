#include "attention/map.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"

namespace sbtrain {
namespace {

std::vector<double> download(Stream& s, const Tensor& x) {
  const int64_t rows = x.rows();
  const Buffer dense = s.scratch("attention map", DType::kF32, {rows, x.cols()});
  ops::copy(s, dense, x);
  std::vector<float> values(static_cast<size_t>(x.numel()));
  ops::copy_to_host(s, values.data(), dense);
  return {values.begin(), values.end()};
}

double dot(const HeadRows& q, int64_t j, const HeadRows& k, int64_t i) {
  const double* a = q.row(j);
  const double* b = k.row(i);
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t c = 0; c < q.width; ++c) sum += a[c] * b[c];
  return sum;
}

// fill(j, row) writes row j [T], which starts as zeros.
template <typename Fill>
AttentionMap map_of_rows(int64_t tokens, Fill fill) {
  AttentionMap map;
  map.tokens = tokens;
  map.weights_TT.resize(static_cast<size_t>(tokens * tokens));
#pragma omp parallel
  {
    std::vector<double> row(static_cast<size_t>(tokens));
#pragma omp for schedule(dynamic, 16)
    for (int64_t j = 0; j < tokens; ++j) {
      std::fill(row.begin(), row.end(), 0.0);
      fill(j, row);
      std::copy(row.begin(), row.end(), map.weights_TT.begin() + j * tokens);
    }
  }
  return map;
}

// Divides by the sum of the row plus eps.
void normalise(std::vector<double>& row, double eps) {
  double sum = eps;
  for (const double x : row) sum += x;
  for (double& x : row) x /= sum;
}

double sigmoid(double z) {
  return 1.0 / (1.0 + std::exp(-z));
}

LogitBias fire_bias(Stream& s, const ops::FireTensors& fire, int64_t head) {
  constexpr int64_t K = ops::kFireHidden;
  const double c = std::abs(download(s, fire.c_1).front());
  const double length = std::abs(download(s, fire.m_1).front()) * ops::kFireLength;
  const std::vector<double> w1 = download(s, fire.w1_K);
  const std::vector<double> b1 = download(s, fire.b1_K);
  const std::vector<double> w2 = download(s, fire.w2_HK.row_range(head, 1));
  const double b2 = download(s, fire.b2_H)[static_cast<size_t>(head)];
  return [=](int64_t j, int64_t i) {
    const auto psi = [&](double x) { return std::log(c * x + 1.0); };
    const auto position = static_cast<double>(j);
    const double u =
        psi(position - static_cast<double>(i)) / (psi(std::max(position, length)) + ops::kFireEps);
    double sum = b2;
    for (int64_t n = 0; n < K; ++n) sum += w2[n] * std::max(w1[n] * u + b1[n], 0.0);
    return sum;
  };
}

}  // namespace

HeadRows download_head(Stream& s, const Tensor& x, int64_t heads, int64_t head) {
  const int64_t width = x.cols() / heads;
  return {.tokens = x.rows(),
          .width = width,
          .values_TN = download(s, x.col_range(head * width, width))};
}

LogitBias no_bias() {
  return [](int64_t /*j*/, int64_t /*i*/) { return 0.0; };
}

LogitBias position_bias(Stream& s, const ops::SoftmaxBias& bias, int64_t heads, int64_t head) {
  if (bias.kind == ops::PositionBias::kFire) return fire_bias(s, bias.fire, head);
  const double slope = ops::alibi_slope(static_cast<int>(heads), static_cast<int>(head));
  return [slope](int64_t j, int64_t i) { return -slope * static_cast<double>(j - i); };
}

AttentionMap softmax_map(const HeadRows& q, const HeadRows& k, const ops::SoftmaxParams& params,
                         const LogitBias& bias) {
  return map_of_rows(q.tokens, [&](int64_t j, std::vector<double>& row) {
    const int64_t first = params.window > 0 ? std::max<int64_t>(0, j - params.window + 1) : 0;
    double maximum = -std::numeric_limits<double>::infinity();
    for (int64_t i = first; i <= j; ++i) {
      row[i] = static_cast<double>(params.scale) * dot(q, j, k, i) + bias(j, i);
      maximum = std::max(maximum, row[i]);
    }
    for (int64_t i = first; i <= j; ++i) row[i] = std::exp(row[i] - maximum);
    normalise(row, 0.0);
  });
}

AttentionMap stickbreaking_map(const HeadRows& q, const HeadRows& k, const HeadRows& gate,
                               const ops::StickBreakingParams& params) {
  std::vector<float> remainder(static_cast<size_t>(q.tokens));
  AttentionMap map = map_of_rows(q.tokens, [&](int64_t j, std::vector<double>& row) {
    double left = 1;  // of the stick
    for (int64_t i = params.attend_current ? j : j - 1; i >= 0; --i) {
      const double z = static_cast<double>(params.scale) * dot(q, j, k, i);
      const double f = gate.tokens > 0 ? *gate.row(i) : 1.0;
      row[i] = f * sigmoid(z) * left;
      left *= (1.0 - f) + f * sigmoid(-z);  // 1 - f sigmoid(z), without cancellation
    }
    remainder[static_cast<size_t>(j)] = static_cast<float>(left);
  });
  map.remainder_T = std::move(remainder);
  return map;
}

AttentionMap rebased_map(const HeadRows& q, const HeadRows& k, const ops::RebasedParams& params) {
  return map_of_rows(q.tokens, [&](int64_t j, std::vector<double>& row) {
    for (int64_t i = 0; i <= j; ++i) {
      const double x = static_cast<double>(params.scale) * dot(q, j, k, i);
      row[i] = params.constant + params.linear * x + params.square * x * x;
    }
    normalise(row, params.eps);
  });
}

}  // namespace sbtrain
