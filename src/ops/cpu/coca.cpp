#include "ops/coca.h"

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

void run(Cpu, Stream& /*s*/, const CocaQuery& op) {
  const int64_t half = op.q_THd.cols() / op.params.rope.heads / 2;
  const bool strict = op.params.variant == CocaVariant::kStrict;
  const auto body = [&](int64_t t, int64_t column, const float* cosine, const float* sine) {
    const Pair q(op.q_THd, t, column, half);
    const Pair y(op.y_THd, t, column, half);
    for (int64_t i = 0; i < half; ++i) {
      const float a = q.first[i];
      const float b = q.second[i];
      const float square = a * a + b * b;
      y.first[i] = strict ? square * cosine[i] : a * (a * cosine[i] - b * sine[i]);
      y.second[i] = strict ? square * sine[i] : b * (b * cosine[i] + a * sine[i]);
    }
  };
  for_each_rotated_head(op.q_THd, op.positions_T, op.params.rope, op.lengths_T, body);
}

// official: dq = dy * R q + R^T (dy * q).  strict: d|q|^2 = first half of R^T dy.
void run(Cpu, Stream& s, const CocaQueryBackward& op) {
  const int64_t half = op.q_THd.cols() / op.params.rope.heads / 2;
  const bool strict = op.params.variant == CocaVariant::kStrict;
  const auto body = [&](int64_t t, int64_t column, const float* cosine, const float* sine) {
    const Pair q(op.q_THd, t, column, half);
    const Pair dy(op.dy_THd, t, column, half);
    const Pair dq(op.dq_THd, t, column, half);
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
  for_each_rotated_head(op.q_THd, op.positions_T, op.params.rope, {}, body);
}

void run(Cpu, Stream& /*s*/, const CocaKey& op) {
  const int64_t half = op.t_THd.cols() / op.params.rope.heads / 2;
  const bool strict = op.params.variant == CocaVariant::kStrict;
  const auto body = [&](int64_t token, int64_t column, const float* cosine, const float* sine) {
    const Pair t(op.t_THd, token, column, half);
    const Pair y(op.y_THd, token, column, half);
    for (int64_t i = 0; i < half; ++i) {
      const float mean = 0.5f * (t.first[i] + t.second[i]);
      const float bar = mean > 0.0f ? mean : 0.0f;
      y.first[i] = strict ? bar * cosine[i] : bar * cosine[i] - bar * sine[i];
      y.second[i] = strict ? bar * sine[i] : bar * cosine[i] + bar * sine[i];
    }
  };
  for_each_rotated_head(op.t_THd, op.positions_T, op.params.rope, op.lengths_T, body);
}

void run(Cpu, Stream& /*s*/, const CocaKeyBackward& op) {
  const int64_t half = op.y_THd.cols() / op.params.rope.heads / 2;
  const bool strict = op.params.variant == CocaVariant::kStrict;
  const auto body = [&](int64_t t, int64_t column, const float* cosine, const float* sine) {
    const Pair y(op.y_THd, t, column, half);
    const Pair dy(op.dy_THd, t, column, half);
    const Pair dt(op.dt_THd, t, column, half);
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
  for_each_rotated_head(op.y_THd, op.positions_T, op.params.rope, {}, body);
}

}  // namespace sbtrain::ops::cpu
