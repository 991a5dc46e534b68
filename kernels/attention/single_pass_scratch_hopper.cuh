// The scratch of the stick-breaking backward pass in a single pass (sm_90a), and what its kernels
// are given.
#pragma once

#include "kernels/attention/launch_hopper.h"
#include "kernels/attention/mainloop_stickbreaking_backward_hopper.cuh"

namespace sbtrain::kernels {

// The layout of its scratch, in bytes from its start.
struct SinglePassScratch {
  int64_t tiles;
  size_t taken, first_keys, states, next, next_dq, dq;
  size_t bytes;
};
inline SinglePassScratch single_pass_scratch(int64_t tokens, int64_t heads, int64_t head_dim) {
  SinglePassScratch s{};
  s.tiles = (tokens + 63) / 64;
  const auto take = [&](int64_t bytes) {
    const size_t begin = s.bytes;
    s.bytes += align_scratch(static_cast<size_t>(bytes));
    return begin;
  };
  s.taken = take(4);
  s.first_keys = take(s.tiles * 64 * 4);
  s.states = take(heads * s.tiles * 64 * 8);
  s.next = take(heads * s.tiles * 4);
  s.next_dq = take(heads * s.tiles * 4);
  s.dq = take(heads * s.tiles * 64 * head_dim * 4);
  return s;
}

template <typename Shape>
SinglePassArguments single_pass_arguments(const StickBreakingProblem& p, void* scratch) {
  const SinglePassScratch s = single_pass_scratch(p.tokens, p.heads, p.head_dim);
  auto* const bytes = static_cast<unsigned char*>(scratch);
  SinglePassArguments x{};
  x.p = p;
  x.tiles = static_cast<int>(s.tiles);
  x.places = static_cast<int>(ceil_div(p.tokens, Shape::kKeys));
  x.taken = reinterpret_cast<int*>(bytes + s.taken);
  x.first_keys = reinterpret_cast<int*>(bytes + s.first_keys);
  x.states = reinterpret_cast<float2*>(bytes + s.states);
  x.next = reinterpret_cast<int*>(bytes + s.next);
  x.next_dq = reinterpret_cast<int*>(bytes + s.next_dq);
  x.dq = reinterpret_cast<float*>(bytes + s.dq);
  x.q = token_tiles(p, p.q, Shape::kQueries);
  x.dout = token_tiles(p, p.dout, Shape::kQueries);
  x.k = key_tiles(p, p.k, kStickKeys);
  x.v = key_tiles(p, p.v, kStickKeys);
  return x;
}

}  // namespace sbtrain::kernels
