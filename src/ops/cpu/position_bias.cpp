#include "ops/cpu/position_bias.h"

#include <cmath>

#include "ops/cpu/simd.h"

namespace sbtrain::ops::cpu {
namespace {

float sign(float x) {
  return static_cast<float>((x > 0.0f) - (x < 0.0f));
}

// u of the lanes: psi(distance) r.
void positions(float* __restrict u, float c, const float* __restrict r, int64_t distance,
               int64_t step) {
  const auto first = static_cast<float>(distance);
  const auto by = static_cast<float>(step);
#pragma omp simd
  for (int64_t q = 0; q < kTile; ++q) {
    const float n = first + by * static_cast<float>(q);
    u[q] = simd::log1p(c * (n > 0.0f ? n : 0.0f)) * r[q];  // negative ones are masked
  }
}

}  // namespace

HeadBias::HeadBias(const SoftmaxBias& bias, int heads, int64_t head) {
  kind_ = bias.kind;
  if (kind_ == PositionBias::kAlibi) slope_ = alibi_slope(heads, static_cast<int>(head));
  if (kind_ != PositionBias::kFire) return;
  c_ = *bias.fire.c_1.f32();
  m_ = *bias.fire.m_1.f32();
  length_ = bias.fire.length;
  b2_ = bias.fire.b2_H.f32()[head];
  std::copy_n(bias.fire.w1_K.f32(), kFireHidden, w1_.data());
  std::copy_n(bias.fire.b1_K.f32(), kFireHidden, b1_.data());
  std::copy_n(bias.fire.w2_HK.f32() + head * kFireHidden, kFireHidden, w2_.data());
}

void HeadBias::set_queries(FireQueries& queries, int64_t first, int64_t step) const {
  if (kind_ != PositionBias::kFire) return;
  const float c = std::abs(c_);
  const float length = std::abs(m_) * length_;
  for (int64_t q = 0; q < kTile; ++q) {
    const auto position = static_cast<float>(first + step * q);
    const float x = std::max(position, length);
    const float r = 1.0f / (std::log1p(c * x) + kFireEps);
    const float dlog = r / (c * x + 1.0f);
    queries.r[q] = r;
    queries.by_c[q] = sign(c_) * x * dlog;
    queries.by_m[q] = length > position ? c * length_ * sign(m_) * dlog : 0.0f;
  }
}

void HeadBias::add(float* z, const FireQueries& queries, int64_t distance, int64_t step) const {
  if (kind_ == PositionBias::kNone) return;
  if (kind_ == PositionBias::kAlibi) {
    const auto first = static_cast<float>(distance);
    const auto by = static_cast<float>(step);
#pragma omp simd
    for (int64_t q = 0; q < kTile; ++q) z[q] -= slope_ * (first + by * static_cast<float>(q));
    return;
  }
  alignas(64) std::array<float, kTile> u;
  positions(u.data(), std::abs(c_), queries.r.data(), distance, step);
  constexpr int64_t kLanes = 16;  // their sums stay in registers
  for (int64_t from = 0; from < kTile; from += kLanes) {
    alignas(64) std::array<float, kLanes> sum;
    sum.fill(b2_);
    for (int k = 0; k < kFireHidden; ++k) {
#pragma omp simd
      for (int64_t q = 0; q < kLanes; ++q) {
        const float hidden = w1_[k] * u[from + q] + b1_[k];
        sum[q] += w2_[k] * (hidden > 0.0f ? hidden : 0.0f);
      }
    }
#pragma omp simd
    for (int64_t q = 0; q < kLanes; ++q) z[from + q] += sum[q];
  }
}

void HeadBias::add_tile(float* z, const FireQueries& queries, const QueryTile& tile, int64_t begin,
                        int64_t keys) const {
  if (kind_ == PositionBias::kNone) return;
  for (int64_t i = 0; i < keys; ++i) add(z + i * kTile, queries, tile.first - (begin + i), 1);
}

void HeadBias::sum_tile(FireSums& sums, const float* dz, const FireQueries& queries,
                        const QueryTile& tile, int64_t begin, int64_t keys) const {
  if (kind_ != PositionBias::kFire) return;
  for (int64_t i = 0; i < keys; ++i) {
    sum_row(sums, dz + i * kTile, queries, tile.first - (begin + i));
  }
}

void HeadBias::sum_row(FireSums& sums, const float* dz, const FireQueries& queries,
                       int64_t distance) const {
  alignas(64) std::array<float, kTile> u;
  alignas(64) std::array<float, kTile> slope{};  // of the MLP at u
  const float c = std::abs(c_);
  positions(u.data(), c, queries.r.data(), distance, 1);
  for (int k = 0; k < kFireHidden; ++k) {
    const float rise = w2_[k] * w1_[k];
    float sum = 0.0f;
    float sum_u = 0.0f;
#pragma omp simd reduction(+ : sum, sum_u)
    for (int64_t q = 0; q < kTile; ++q) {
      const bool active = w1_[k] * u[q] + b1_[k] > 0.0f;
      const float g = active ? dz[q] : 0.0f;
      sum += g;
      sum_u += g * u[q];
      slope[q] += active ? rise : 0.0f;
    }
    sums.dz[k] += sum;
    sums.dz_u[k] += sum_u;
  }
  const auto first = static_cast<float>(distance);
  const float sign_c = sign(c_);
  float all = 0.0f;
  float by_c = 0.0f;
  float by_m = 0.0f;
#pragma omp simd reduction(+ : all, by_c, by_m)
  for (int64_t q = 0; q < kTile; ++q) {
    const float distance_q = first + static_cast<float>(q);
    const float n = distance_q > 0.0f ? distance_q : 0.0f;
    const float du = dz[q] * slope[q];
    all += dz[q];
    by_c += du * (sign_c * n / (c * n + 1.0f) * queries.r[q] - u[q] * queries.by_c[q]);
    by_m -= du * u[q] * queries.by_m[q];
  }
  sums.all_dz += all;
  sums.c += by_c;
  sums.m += by_m;
}

void add_fire_gradients(const FireTensors& dfire, const FireTensors& fire,
                        const std::vector<FireSums>& heads) {
  double c = 0;
  double m = 0;
  std::array<double, kFireHidden> w1{};
  std::array<double, kFireHidden> b1{};
  for (size_t h = 0; h < heads.size(); ++h) {
    const FireSums& sums = heads[h];
    const float* w2 = fire.w2_HK.f32() + h * kFireHidden;
    float* dw2 = dfire.w2_HK.f32() + h * kFireHidden;
    for (int k = 0; k < kFireHidden; ++k) {
      dw2[k] +=
          static_cast<float>(fire.w1_K.f32()[k] * sums.dz_u[k] + fire.b1_K.f32()[k] * sums.dz[k]);
      w1[k] += w2[k] * sums.dz_u[k];
      b1[k] += w2[k] * sums.dz[k];
    }
    dfire.b2_H.f32()[h] += static_cast<float>(sums.all_dz);
    c += sums.c;
    m += sums.m;
  }
  for (int k = 0; k < kFireHidden; ++k) {
    dfire.w1_K.f32()[k] += static_cast<float>(w1[k]);
    dfire.b1_K.f32()[k] += static_cast<float>(b1[k]);
  }
  *dfire.c_1.f32() += static_cast<float>(c);
  *dfire.m_1.f32() += static_cast<float>(m);
}

}  // namespace sbtrain::ops::cpu
