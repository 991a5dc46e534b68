#include "kernels/coca.h"
#include "kernels/pack.cuh"
#include "kernels/rope_turns.cuh"

namespace sbtrain::kernels {
namespace {

constexpr int kThreads = 256;

// The halves of a head at one frequency, and their rotation by the position and back.
struct Halves {
  float first, second;
};
struct Rotation {
  float cosine, sine;
  __device__ Halves turn(Halves x) const {
    return {x.first * cosine - x.second * sine, x.second * cosine + x.first * sine};
  }
  __device__ Halves turn_back(Halves x) const { return Rotation{cosine, -sine}.turn(x); }
};

template <CocaTransform kTransform, bool kStrict>
__device__ Halves transformed(Halves x, Halves dy, Rotation r) {
  if constexpr (kTransform == CocaTransform::kQuery) {
    if (kStrict) return r.turn({x.first * x.first + x.second * x.second, 0.0f});
    const Halves turned = r.turn(x);
    return {x.first * turned.first, x.second * turned.second};
  } else if constexpr (kTransform == CocaTransform::kQueryBackward) {
    if (kStrict) {
      const float dsquare = r.turn_back(dy).first;
      return {2.0f * x.first * dsquare, 2.0f * x.second * dsquare};
    }
    const Halves turned = r.turn(x);
    const Halves back = r.turn_back({dy.first * x.first, dy.second * x.second});
    return {dy.first * turned.first + back.first, dy.second * turned.second + back.second};
  } else if constexpr (kTransform == CocaTransform::kKey) {
    const float bar = fmaxf(0.5f * (x.first + x.second), 0.0f);
    return r.turn({bar, kStrict ? 0.0f : bar});
  } else {
    const bool active = x.first != 0.0f || x.second != 0.0f;
    const Halves back = r.turn_back(dy);
    const float dbar = kStrict ? back.first : back.first + back.second;
    const float dt = active ? 0.5f * dbar : 0.0f;
    return {dt, dt};
  }
}

// A thread takes kWidth neighbouring frequencies of one row in all heads, so that their sines are
// computed once.
template <CocaTransform kTransform, bool kStrict, int kWidth, bool kByLength>
__global__ void __launch_bounds__(kThreads) coca_kernel(const __grid_constant__ Coca p) {
  constexpr bool kBackward =
      kTransform == CocaTransform::kQueryBackward || kTransform == CocaTransform::kKeyBackward;
  const int half = p.y.head_dim / 2;
  const int threads_per_row = half / kWidth;
  const int64_t task = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = task / threads_per_row;
  if (row >= p.y.rows) return;
  const int first = static_cast<int>(task - row * threads_per_row) * kWidth;
  const double position = p.y.positions[row];
  const RowTurns<kByLength> turns_of(p.y, row);
  Rotation rotations[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    const double turns = position * turns_of[first + i];
    sincospif(2.0f * static_cast<float>(turns - rint(turns)), &rotations[i].sine,
              &rotations[i].cosine);
  }
  for (int head = 0; head < p.y.heads; ++head) {
    const int column = head * p.y.head_dim + first;
    const bf16* const x = p.x.row(row) + column;
    const auto x1 = load_floats<kWidth>(x);
    const auto x2 = load_floats<kWidth>(x + half);
    Pack<float, kWidth> dy1{};
    Pack<float, kWidth> dy2{};
    if constexpr (kBackward) {
      const bf16* const dy = p.dy.row(row) + column;
      dy1 = load_floats<kWidth>(dy);
      dy2 = load_floats<kWidth>(dy + half);
    }
    Pack<float, kWidth> y1;
    Pack<float, kWidth> y2;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const Halves y =
          transformed<kTransform, kStrict>({x1[i], x2[i]}, {dy1[i], dy2[i]}, rotations[i]);
      y1[i] = y.first;
      y2[i] = y.second;
    }
    bf16* const y = p.y.x.row(row) + column;
    store_floats(y, y1);
    store_floats(y + half, y2);
  }
}

template <CocaTransform kTransform, bool kStrict>
void launch(cudaStream_t stream, const Coca& p) {
  const int half = p.y.head_dim / 2;
  const bool vectors =
      half % 8 == 0 && vectors_fit<8>(p.y.x, p.x) && (p.dy.data == nullptr || vectors_fit<8>(p.dy));
  with_width<8>(vectors, [&](auto width) {
    constexpr int kWidth = decltype(width)::value;
    const unsigned grid = blocks(p.y.rows * (half / kWidth), kThreads);
    if constexpr (kTransform == CocaTransform::kQuery || kTransform == CocaTransform::kKey) {
      if (p.y.lengths != nullptr) {
        coca_kernel<kTransform, kStrict, kWidth, true><<<grid, kThreads, 0, stream>>>(p);
        return;
      }
    }
    coca_kernel<kTransform, kStrict, kWidth, false><<<grid, kThreads, 0, stream>>>(p);
  });
  check_launch("coca");
}

template <CocaTransform kTransform>
void launch(cudaStream_t stream, const Coca& p) {
  p.strict ? launch<kTransform, true>(stream, p) : launch<kTransform, false>(stream, p);
}

}  // namespace

void launch(cudaStream_t stream, const Coca& p) {
  if (p.y.rows == 0 || p.y.heads == 0 || p.y.head_dim == 0) return;
  switch (p.transform) {
    case CocaTransform::kQuery:
      return launch<CocaTransform::kQuery>(stream, p);
    case CocaTransform::kQueryBackward:
      return launch<CocaTransform::kQueryBackward>(stream, p);
    case CocaTransform::kKey:
      return launch<CocaTransform::kKey>(stream, p);
    case CocaTransform::kKeyBackward:
      return launch<CocaTransform::kKeyBackward>(stream, p);
  }
}

}  // namespace sbtrain::kernels
