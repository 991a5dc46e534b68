// Attention with quadratic polynomials as weights, Based (arXiv 2402.18668) and ReBased (arXiv
// 2402.10644), over packed documents: see ops/rebased.h for what it computes. With mma.sync, any
// GPU from sm_80 on; up to kMaxRebasedFeatures features and kMaxRebasedValues values for each head.
#pragma once

#include "kernels/types.h"

namespace sbtrain::kernels {

// A bf16 matrix with a row for each token, heads side by side; any alignment.
using RebasedTensor = Matrix<bf16>;

// s(x) = constant + linear x + square x^2 of x = scale q.k.
struct RebasedPolynomial {
  float scale, constant, linear, square, eps;
};

struct Rebased {
  int tokens = 0, heads = 0, features = 0, values = 0;
  RebasedPolynomial s{};
  bool chunked = false;                 // else: over all pairs
  const int32_t* cu_seqlens = nullptr;  // [sequences + 1]
  const int32_t* positions = nullptr;   // [T]
  int sequences = 0;
  RebasedTensor q{}, k{}, v{}, o{};
  float* den = nullptr;  // [H, T]
  RebasedTensor dout{}, dq{}, dk{}, dv{};
  // In the chunked form f32 [rebased_chunks(tokens), group, rows, values + 1], the states of the
  // `group` heads that are computed at a time. In the backward pass, f32 [H, T] after them.
  float* scratch = nullptr;
  int group = 0;
};

// Writes o and den.
void rebased_forward(cudaStream_t stream, const Rebased& p);
// Writes dq, dk and dv, the same bits on every run.
void rebased_backward(cudaStream_t stream, const Rebased& p);
// state [heads, rows, values + 1] = the state after all tokens, which are one sequence. Of p it
// reads only k, v, the sizes, s and the scratch.
void rebased_state(cudaStream_t stream, const Rebased& p, float* state);

// For each of `batch` sequences: adds the key and value to state [batch, heads, rows, values + 1],
// f32, which is cleared before that at position 0; then writes o.
struct RebasedDecode {
  RebasedTensor o, q, k, v;
  float* state;
  const int32_t* positions;
  int64_t batch;
  int heads, features, values;
  RebasedPolynomial s;
};
void launch(cudaStream_t stream, const RebasedDecode& p);

}  // namespace sbtrain::kernels
