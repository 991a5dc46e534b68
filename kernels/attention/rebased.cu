#include "kernels/attention/launch_attention.h"
#include "kernels/attention/mainloop_rebased_backward.cuh"
#include "kernels/attention/mainloop_rebased_forward.cuh"
#include "kernels/attention/rebased.h"
#include "kernels/attention/rebased_sums.cuh"

namespace sbtrain::kernels {
namespace {

bool has_lower(const RebasedPolynomial& s) {
  return s.constant != 0.0f || s.linear != 0.0f;
}

// The number of elements by which heads of `size` can be read.
int width_of(int size, std::initializer_list<const RebasedTensor*> tensors) {
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

RebasedLaunch launch_of(const Rebased& p) {
  RebasedLaunch t{};
  t.p = p;
  t.f_width = width_of(p.features, {&p.q, &p.k, &p.dq, &p.dk});
  t.e_width = width_of(p.values, {&p.v, &p.o, &p.dout, &p.dv});
  t.lower = has_lower(p.s);
  return t;
}

// The same problem for heads [first, first + count).
RebasedLaunch heads_of(RebasedLaunch t, int first, int count) {
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
void for_each_group(const RebasedLaunch& t, int group, Run&& run) {
  for (int first = 0; first < t.p.heads; first += group) {
    run(heads_of(t, first, std::min(group, t.p.heads - first)));
  }
}

template <int kF, typename Run>
void with_values(int values, Run&& run) {
  if (values <= 16) return run(RebasedShape<kF, 16>{});
  if (values <= 32) return run(RebasedShape<kF, 32>{});
  if (values <= 64) return run(RebasedShape<kF, 64>{});
  run(RebasedShape<kF, 128>{});
}
// Calls run(shape) with the smallest shape that holds the heads.
template <typename Run>
void with_shape(const Rebased& p, Run&& run) {
  if (p.features < 1 || p.features > kMaxRebasedFeatures || p.values < 1 ||
      p.values > kMaxRebasedValues) {
    throw std::invalid_argument("rebased: heads of " + std::to_string(p.features) +
                                " features and " + std::to_string(p.values) + " values");
  }
  if (p.features <= 16) {
    with_values<16>(p.values, run);
  } else {
    with_values<32>(p.values, run);
  }
}

// Launches one block for every S::kRows tokens of each head.
template <typename S>
void launch(const char* name, cudaStream_t stream, void (*kernel)(RebasedLaunch),
            const RebasedLaunch& t) {
  launch_attention(name, stream, kernel, attention_grid(t.p.tokens, S::kRows, t.p.heads),
                   kRebasedThreads, S::kSharedBytes, t);
}

int64_t state_elements(const RebasedLaunch& t) {
  return int64_t{t.p.heads} * rebased_rows(t.p.features, t.lower) * (t.p.values + 1);
}

template <typename S, RebasedSide kSide>
void sum_chunks(cudaStream_t stream, const RebasedLaunch& t) {
  launch_attention("rebased", stream, rebased_sum_kernel<S::kF, S::kE, kSide>,
                   attention_grid(t.p.tokens, kRebasedChunk, t.p.heads), kRebasedThreads,
                   RebasedSumShape<S::kF, S::kE>::kSharedBytes, t);
}
// Forms the states that enter the chunks, or the gradients of those that leave them.
template <typename S, RebasedSide kSide>
void form_states(cudaStream_t stream, const RebasedLaunch& t) {
  if (t.states == nullptr) return;
  sum_chunks<S, kSide>(stream, t);
  const int64_t elements = state_elements(t);
  rebased_scan_kernel<<<blocks(elements, kScanThreads), kScanThreads, 0, stream>>>(
      t.states, elements, t.p.tokens, t.p.positions, kSide == RebasedSide::kQueries);
  check_launch("rebased");
}

void write_delta(cudaStream_t stream, const RebasedLaunch& t, float* delta) {
  const unsigned grid = blocks(int64_t{t.p.tokens} * t.p.heads, kRebasedThreads);
  switch (t.e_width) {
    case 8:
      rebased_delta_kernel<8><<<grid, kRebasedThreads, 0, stream>>>(t, delta);
      break;
    case 4:
      rebased_delta_kernel<4><<<grid, kRebasedThreads, 0, stream>>>(t, delta);
      break;
    default:
      rebased_delta_kernel<1><<<grid, kRebasedThreads, 0, stream>>>(t, delta);
  }
  check_launch("rebased_backward");
}

}  // namespace

void rebased_forward(cudaStream_t stream, const Rebased& p) {
  with_shape(p, [&](auto shape) {
    using S = decltype(shape);
    if (p.tokens == 0) return;
    RebasedLaunch all = launch_of(p);
    if (p.chunked) all.states = p.scratch;
    for_each_group(all, p.chunked ? p.group : p.heads, [&](const RebasedLaunch& t) {
      form_states<S, RebasedSide::kKeys>(stream, t);
      launch<S>("rebased_forward", stream, rebased_forward_kernel<S>, t);
    });
  });
}

void rebased_backward(cudaStream_t stream, const Rebased& p) {
  with_shape(p, [&](auto shape) {
    using S = decltype(shape);
    if (p.tokens == 0) return;
    RebasedLaunch all = launch_of(p);
    float* delta = p.scratch;
    if (p.chunked) {
      all.states = p.scratch;
      delta +=
          rebased_chunks(p.tokens) * p.group * rebased_rows(p.features, all.lower) * (p.values + 1);
    }
    all.delta = delta;
    write_delta(stream, all, delta);
    for_each_group(all, p.chunked ? p.group : p.heads, [&](const RebasedLaunch& t) {
      form_states<S, RebasedSide::kKeys>(stream, t);
      launch<S>("rebased_backward", stream, rebased_query_gradient_kernel<S>, t);
      form_states<S, RebasedSide::kQueries>(stream, t);
      launch<S>("rebased_backward", stream, rebased_key_gradient_kernel<S>, t);
    });
  });
}

void rebased_state(cudaStream_t stream, const Rebased& p, float* state) {
  with_shape(p, [&](auto shape) {
    using S = decltype(shape);
    RebasedLaunch all = launch_of(p);
    all.p.positions = nullptr;
    all.states = p.scratch;
    const int64_t chunks = rebased_chunks(p.tokens);
    float* to = state;
    for_each_group(all, p.group, [&](const RebasedLaunch& t) {
      if (chunks > 0) sum_chunks<S, RebasedSide::kKeys>(stream, t);
      const int64_t elements = state_elements(t);
      rebased_total_kernel<<<blocks(elements, kScanThreads), kScanThreads, 0, stream>>>(
          to, t.states, elements, chunks);
      check_launch("rebased_state");
      to += elements;
    });
  });
}

}  // namespace sbtrain::kernels
