// FIRE's parameters outside of attention: forms the tables that the score (score_fire.cuh) reads,
// and the gradient of each parameter from the sums over tiles that the score leaves.
#pragma once

#include <cuda_bf16.h>

#include "kernels/attention/position_bias.h"
#include "kernels/attention/score_fire.cuh"
#include "kernels/attention/softmax.h"

namespace sbtrain::kernels {

// ---- Tables -------------------------------------------------------------------------------------

inline __device__ FireNetwork load_network(const FireParameters& x) {
  FireNetwork net;
  for (int k = 0; k < kFireUnits; ++k) {
    net.w1[k] = __bfloat162float(x.w1[k]);
    net.b1[k] = __bfloat162float(x.b1[k]);
  }
  return net;
}

static __global__ void fire_positions_kernel(SoftmaxProblem p, FireParameters x, FireTables to) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const float c = __bfloat162float(*x.c), m = __bfloat162float(*x.m);
  if (i < p.max_seqlen + 2 * kFireMargin) to.distances[i] = fire_distance(c, i - kFireMargin);
  if (i >= p.tokens + kFireMargin) return;
  const FireQuery query =
      i < p.tokens ? fire_query(c, m, x.length, p.positions[i]) : FireQuery{0.0f, 0.0f, 0.0f, 0.0f};
  to.r_T[i] = query.r;
  if (to.queries_T != nullptr) to.queries_T[i] = query;
}

// One block of two warps for each head.
static __global__ void fire_network_kernel(FireParameters x, FireTables to) {
  __shared__ FireNetwork net;
  __shared__ float w2[kFireUnits];
  __shared__ int ranks[kFireUnits];
  const int head = static_cast<int>(blockIdx.x), i = static_cast<int>(threadIdx.x);
  if (i == 0) net = load_network(x);
  if (i < kFireUnits) w2[i] = __bfloat162float(x.w2[head * kFireUnits + i]);
  __syncthreads();
  if (i < kFireUnits) {
    ranks[i] = fire_rank(net, i);
    to.bends_HK[head * kFireUnits + ranks[i]] = kLog2e * fire_bend(net.w1[i], w2[i]);
    if (head == 0) to.breaks_K[ranks[i]] = fire_break(net.w1[i], net.b1[i]);
  }
  __syncthreads();
  if (i > kFireUnits) return;
  const FireLine line = fire_line(net, w2, __bfloat162float(x.b2[head]), ranks, i);
  to.lines_HS[head * (kFireUnits + 1) + i] = make_float2(
      kLog2e * static_cast<float>(line.slope), kLog2e * static_cast<float>(line.intercept));
}

// ---- Gradients ----------------------------------------------------------------------------------

inline constexpr int kFireSumParts = 4;

// Adds up the blocks of one head, in order: the head's part of the gradients of the units, c and m,
// and the whole of dw2.
static __global__ __launch_bounds__(kFireSums* kFireSumParts) void fire_heads_kernel(
    FireParameters x, FireGradients dx, const float* partials, int blocks, double* units_HK2,
    double* heads_H2) {
  __shared__ double parts[kFireSumParts][kFireSums];
  __shared__ FireNetwork net;
  const int head = static_cast<int>(blockIdx.x);
  const int i = static_cast<int>(threadIdx.x), part = static_cast<int>(threadIdx.y);
  const float* const mine = partials + static_cast<int64_t>(head) * blocks * kFireSums;
  double sum = 0.0;
  for (int block = part; block < blocks; block += kFireSumParts) {
    sum += static_cast<double>(mine[static_cast<int64_t>(block) * kFireSums + i]);
  }
  parts[part][i] = sum;
  if (i == 0 && part == 0) net = load_network(x);
  __syncthreads();
  if (part == 0) {
    for (int other = 1; other < kFireSumParts; ++other) parts[0][i] += parts[other][i];
  }
  __syncthreads();
  if (part != 0 || i >= kFireUnits) return;
  const float w1 = net.w1[i], b1 = net.b1[i];
  const FireUnitSums unit = fire_unit_sums(parts[0], w1, b1, fire_rank(net, i));
  const int at = head * kFireUnits + i;
  units_HK2[2 * at] = unit.dz;
  units_HK2[2 * at + 1] = unit.dz_u;
  dx.w2[at] +=
      static_cast<float>(static_cast<double>(w1) * unit.dz_u + static_cast<double>(b1) * unit.dz);
  if (i < 2) heads_H2[2 * head + i] = parts[0][2 * FireSlot::parameters() + i];
}

// One warp adds up the heads, in order.
static __global__ void fire_parameters_kernel(FireParameters x, FireGradients dx, int heads,
                                              const double* units_HK2, const double* heads_H2) {
  const int i = static_cast<int>(threadIdx.x);
  double dw1 = 0.0, db1 = 0.0, parameter = 0.0;
  for (int head = 0; head < heads; ++head) {
    const int at = head * kFireUnits + i;
    const auto w2 = static_cast<double>(__bfloat162float(x.w2[at]));
    db1 += w2 * units_HK2[2 * at];
    dw1 += w2 * units_HK2[2 * at + 1];
    if (i < 2) parameter += heads_H2[2 * head + i];
  }
  dx.w1[i] += static_cast<float>(dw1);
  dx.b1[i] += static_cast<float>(db1);
  if (i == 0) *dx.c += static_cast<float>(parameter);
  if (i == 1) *dx.m += static_cast<float>(parameter);
}

}  // namespace sbtrain::kernels
