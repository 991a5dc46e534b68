#include "ops/short_conv.h"

#include <array>
#include <vector>

#include "ops/cpu/token_sums.h"

namespace sbtrain::ops::cpu {
namespace {

// The rows of u that a token's convolution reads: u[t], u[t-1], u[t-2], zeros before the document.
using Taps = std::array<const float*, kShortConv>;

Taps taps_of(const Tensor& u_TD, int64_t t, int32_t position, const float* zeros) {
  Taps taps;
  for (int64_t back = 0; back < kShortConv; ++back) {
    taps[back] = position >= back ? u_TD.f32() + (t - back) * u_TD.row_stride : zeros;
  }
  return taps;
}

// Channel i of the convolution; the last tap is the token's own.
float convolve(const Taps& u, const float* w, const float* b, int64_t i) {
  const float* taps = w + i * kShortConv;
  return b[i] + taps[2] * u[0][i] + taps[1] * u[1][i] + taps[0] * u[2][i];
}

}  // namespace

void run(Cpu, Stream& /*s*/, const ShortConvForward& t) {
  const int64_t width = t.u_TD.cols();
  const std::vector<float> zeros(static_cast<size_t>(width));
  const int32_t* positions = t.positions_T.i32();
  parallel_rows(t.u_TD.rows(), 4 * width, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const Taps u = taps_of(t.u_TD, n, positions[n], zeros.data());
      const float* gate = t.gate_TD.f32() + n * t.gate_TD.row_stride;
      float* y = t.y_TD.f32() + n * t.y_TD.row_stride;
      for (int64_t i = 0; i < width; ++i) {
        y[i] =
            convolve(u, t.w.w_D3.f32(), t.w.b_D.f32(), i) * (gate[i] + t.w.gate_bias_D.f32()[i]) +
            u[0][i];
      }
    }
  });
}

// dgate = dy c,  dc = dy (gate + gate_bias),  du_t = dy_t + sum_m w_{2-m} dc_{t+m} over the tokens
// t + m of the same document.
void run(Cpu, Stream& /*s*/, const ShortConvBackward& t, const Buffer& scratch) {
  const int64_t width = t.u_TD.cols();
  const int64_t tokens = t.u_TD.rows();
  const std::vector<float> zeros(static_cast<size_t>(width));
  const int32_t* positions = t.positions_T.i32();
  const float* kernel = t.w.w_D3.f32();
  const float* gate_bias = t.w.gate_bias_D.f32();
  // Sums of a channel: its three taps, the bias, the gate's bias.
  constexpr int64_t kSums = kShortConv + 2;
  const auto body = [&](float* sums, int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const Taps u = taps_of(t.u_TD, n, positions[n], zeros.data());
      const float* dy = t.dy_TD.f32() + n * t.dy_TD.row_stride;
      const float* gate = t.gate_TD.f32() + n * t.gate_TD.row_stride;
      float* dgate = t.dgate_TD.f32() + n * t.dgate_TD.row_stride;
      float* du = t.du_TD.f32() + n * t.du_TD.row_stride;
      for (int64_t i = 0; i < width; ++i) {
        const float dc = dy[i] * (gate[i] + gate_bias[i]);
        dgate[i] = dy[i] * convolve(u, kernel, t.w.b_D.f32(), i);
        du[i] = dy[i] + kernel[i * kShortConv + 2] * dc;
        float* sum = sums + i * kSums;
        for (int64_t k = 0; k < kShortConv; ++k) sum[k] += dc * u[2 - k][i];
        sum[3] += dc;
        sum[4] += dgate[i];
      }
      for (int64_t m = 1; m < kShortConv; ++m) {
        if (n + m >= tokens || positions[n + m] < m) break;
        const float* later_dy = t.dy_TD.f32() + (n + m) * t.dy_TD.row_stride;
        const float* later_gate = t.gate_TD.f32() + (n + m) * t.gate_TD.row_stride;
        for (int64_t i = 0; i < width; ++i) {
          du[i] += kernel[i * kShortConv + 2 - m] * later_dy[i] * (later_gate[i] + gate_bias[i]);
        }
      }
    }
  };
  sum_over_tokens(
      scratch, tokens, kSums * width, body, [&](const float* sums, int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          const int64_t channel = i / kSums;
          const int64_t which = i % kSums;
          float& target = which < kShortConv    ? t.dw.w_D3.f32()[channel * kShortConv + which]
                          : which == kShortConv ? t.dw.b_D.f32()[channel]
                                                : t.dw.gate_bias_D.f32()[channel];
          target += sums[i];
        }
      });
}

void run(Cpu, Stream& /*s*/, const ShortConvDecode& t) {
  const int64_t width = t.u_BD.cols();
  const std::vector<float> zeros(static_cast<size_t>(width));
  for (int64_t b = 0; b < t.u_BD.rows(); ++b) {
    const int32_t position = t.positions_B.i32()[b];
    float* earlier = t.state_B2D.f32() + b * t.state_B2D.row_stride;
    float* before = earlier + width;
    const float* u = t.u_BD.f32() + b * t.u_BD.row_stride;
    const float* gate = t.gate_BD.f32() + b * t.gate_BD.row_stride;
    float* y = t.y_BD.f32() + b * t.y_BD.row_stride;
    const Taps taps = {u, position >= 1 ? before : zeros.data(),
                       position >= 2 ? earlier : zeros.data()};
    for (int64_t i = 0; i < width; ++i) {
      const float c = convolve(taps, t.w.w_D3.f32(), t.w.b_D.f32(), i);
      y[i] = c * (gate[i] + t.w.gate_bias_D.f32()[i]) + u[i];
    }
    std::copy_n(before, width, earlier);
    std::copy_n(u, width, before);
  }
}

}  // namespace sbtrain::ops::cpu
