// What the launches of Based and ReBased share: the shape for the problem's heads, the heads in
// groups, and the states.
#pragma once

#include "kernels/attention/launch_attention.h"
#include "kernels/attention/rebased.h"
#include "kernels/attention/rebased_tiles.cuh"

namespace sbtrain::kernels {

// The number of elements by which heads of `size` can be read.
inline int rebased_vector_width(int size, std::initializer_list<const RebasedTensor*> tensors) {
  for (const int width : {8, 4}) {
    bool fits = size % width == 0;
    for (const RebasedTensor* x : tensors) {
      fits =
          fits && x->stride % width == 0 && reinterpret_cast<uintptr_t>(x->data) % (2 * width) == 0;
    }
    if (fits) return width;
  }
  return 1;
}

inline RebasedLaunch rebased_launch(const Rebased& p) {
  RebasedLaunch t{};
  t.p = p;
  t.f_width = rebased_vector_width(p.features, {&p.q, &p.k, &p.dq, &p.dk});
  t.e_width = rebased_vector_width(p.values, {&p.v, &p.o, &p.dout, &p.dv});
  t.lower = p.s.constant != 0.0f || p.s.linear != 0.0f;
  return t;
}

// The same problem for heads [first, first + count).
inline RebasedLaunch rebased_heads(RebasedLaunch t, int first, int count) {
  const auto advance = [](auto*& data, int64_t elements) {
    if (data != nullptr) data += elements;
  };
  for (RebasedTensor* x : {&t.p.q, &t.p.k, &t.p.dq, &t.p.dk}) {
    advance(x->data, int64_t{first} * t.p.features);
  }
  for (RebasedTensor* x : {&t.p.v, &t.p.o, &t.p.dout, &t.p.dv}) {
    advance(x->data, int64_t{first} * t.p.values);
  }
  advance(t.p.den, int64_t{first} * t.p.tokens);
  advance(t.delta, int64_t{first} * t.p.tokens);
  t.p.heads = count;
  return t;
}

// Calls run(heads) for all heads, `group` at a time.
template <typename Run>
void for_each_rebased_group(const RebasedLaunch& t, int group, Run&& run) {
  for (int first = 0; first < t.p.heads; first += group) {
    run(rebased_heads(t, first, std::min(group, t.p.heads - first)));
  }
}

// Calls run(shape) with the smallest shape that holds the heads. Heads of more than 16 features are
// rare and have one shape, with the bits that smaller ones would give: what it adds are zeros.
template <typename Run>
void with_rebased_shape(const Rebased& p, Run&& run) {
  if (p.features < 1 || p.features > kMaxRebasedFeatures || p.values < 1 ||
      p.values > kMaxRebasedValues) {
    throw_invalid_argument("rebased: heads of %d features and %d values", p.features, p.values);
  }
  if (p.features > 16) return run(RebasedShape<32, 128>{});
  if (p.values <= 16) return run(RebasedShape<16, 16>{});
  if (p.values <= 32) return run(RebasedShape<16, 32>{});
  if (p.values <= 64) return run(RebasedShape<16, 64>{});
  run(RebasedShape<16, 128>{});
}

// Launches one block for every S::kRows tokens of each head.
template <typename S>
void launch_rebased(const char* name, cudaStream_t stream, void (*kernel)(RebasedLaunch),
                    const RebasedLaunch& t) {
  launch_attention(name, stream, kernel, attention_grid(t.p.tokens, S::kRows, t.p.heads),
                   kRebasedThreads, S::kSharedBytes, t);
}

// Forms the states that enter the chunks, or the gradients of those that leave them, unless the
// problem is over all pairs.
void form_rebased_states(cudaStream_t stream, const RebasedLaunch& t, RebasedSide side);

}  // namespace sbtrain::kernels
