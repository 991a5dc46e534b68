#include "ops/cpu/cpu.h"
#include "ops/cpu/rotation.h"

namespace sbtrain::ops::cpu {
namespace {

// The two halves of one head.
struct Pair {
  Pair(const Tensor& x, int64_t t, int64_t column, int64_t half)
      : first(x.f32() + t * x.row_stride + column), second(first + half) {}
  float* first;
  float* second;
};

}  // namespace

void coca_query(Stream& /*s*/, Tensor y_THd, Tensor q_THd, Tensor positions_T,
                const CocaParams& params) {
  const int64_t half = q_THd.cols() / params.rope.heads / 2;
  const bool strict = params.variant == CocaVariant::kStrict;
  const auto body = [&](int64_t t, int64_t column, const float* cosine, const float* sine) {
    const Pair q(q_THd, t, column, half);
    const Pair y(y_THd, t, column, half);
    for (int64_t i = 0; i < half; ++i) {
      const float a = q.first[i];
      const float b = q.second[i];
      const float square = a * a + b * b;
      y.first[i] = strict ? square * cosine[i] : a * (a * cosine[i] - b * sine[i]);
      y.second[i] = strict ? square * sine[i] : b * (b * cosine[i] + a * sine[i]);
    }
  };
  for_each_rotated_head(q_THd, positions_T, params.rope, body);
}

// official: dq = dy * R q + R^T (dy * q).  strict: d|q|^2 = first half of R^T dy.
void coca_query_backward(Stream& /*s*/, Tensor dq_THd, Tensor dy_THd, Tensor q_THd,
                         Tensor positions_T, const CocaParams& params) {
  const int64_t half = q_THd.cols() / params.rope.heads / 2;
  const bool strict = params.variant == CocaVariant::kStrict;
  const auto body = [&](int64_t t, int64_t column, const float* cosine, const float* sine) {
    const Pair q(q_THd, t, column, half);
    const Pair dy(dy_THd, t, column, half);
    const Pair dq(dq_THd, t, column, half);
    for (int64_t i = 0; i < half; ++i) {
      const float c = cosine[i];
      const float s = sine[i];
      const float a = q.first[i];
      const float b = q.second[i];
      const float da = dy.first[i];
      const float db = dy.second[i];
      const float dsquare = da * c + db * s;
      dq.first[i] = strict ? 2.0f * a * dsquare : da * (a * c - b * s) + da * a * c + db * b * s;
      dq.second[i] = strict ? 2.0f * b * dsquare : db * (b * c + a * s) + db * b * c - da * a * s;
    }
  };
  for_each_rotated_head(q_THd, positions_T, params.rope, body);
}

void coca_key(Stream& /*s*/, Tensor y_THd, Tensor t_THd, Tensor positions_T,
              const CocaParams& params) {
  const int64_t half = t_THd.cols() / params.rope.heads / 2;
  const bool strict = params.variant == CocaVariant::kStrict;
  const auto body = [&](int64_t token, int64_t column, const float* cosine, const float* sine) {
    const Pair t(t_THd, token, column, half);
    const Pair y(y_THd, token, column, half);
    for (int64_t i = 0; i < half; ++i) {
      const float mean = 0.5f * (t.first[i] + t.second[i]);
      const float bar = mean > 0.0f ? mean : 0.0f;
      y.first[i] = strict ? bar * cosine[i] : bar * cosine[i] - bar * sine[i];
      y.second[i] = strict ? bar * sine[i] : bar * cosine[i] + bar * sine[i];
    }
  };
  for_each_rotated_head(t_THd, positions_T, params.rope, body);
}

void coca_key_backward(Stream& /*s*/, Tensor dt_THd, Tensor dy_THd, Tensor y_THd,
                       Tensor positions_T, const CocaParams& params) {
  const int64_t half = y_THd.cols() / params.rope.heads / 2;
  const bool strict = params.variant == CocaVariant::kStrict;
  const auto body = [&](int64_t t, int64_t column, const float* cosine, const float* sine) {
    const Pair y(y_THd, t, column, half);
    const Pair dy(dy_THd, t, column, half);
    const Pair dt(dt_THd, t, column, half);
    for (int64_t i = 0; i < half; ++i) {
      const bool active = y.first[i] != 0.0f || y.second[i] != 0.0f;
      const float da = dy.first[i];
      const float db = dy.second[i];
      const float first = da * cosine[i] + db * sine[i];  // of R^T dy
      const float second = db * cosine[i] - da * sine[i];
      const float dbar = strict ? first : first + second;
      dt.first[i] = dt.second[i] = active ? 0.5f * dbar : 0.0f;
    }
  };
  for_each_rotated_head(y_THd, positions_T, params.rope, body);
}

}  // namespace sbtrain::ops::cpu
