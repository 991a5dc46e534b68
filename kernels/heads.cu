#include "kernels/elementwise.cuh"
#include "kernels/heads.h"

namespace sbtrain::kernels {
namespace {

// Packs do not cross heads: their width divides head_dim.
struct RepeatHeadsOp {
  RepeatHeads p;
  template <int kWidth>
  __device__ Pack<bf16, kWidth> load(int64_t row, int64_t col) const {
    const int head = static_cast<int>(col) / p.head_dim;
    const int group = head / (p.heads / p.groups);
    return load_pack<kWidth>(p.x.row(row) + (group - head) * p.head_dim + col);
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Pack<bf16, kWidth>& loaded) const {
    store_pack(p.y.row(row) + col, loaded);
  }
};

struct RepeatHeadsBackwardOp {
  RepeatHeadsBackward p;
  template <int kWidth>
  __device__ Pack<float, kWidth> load(int64_t row, int64_t col) const {
    const int group = static_cast<int>(col) / p.head_dim;
    const int heads = p.heads / p.groups;
    const bf16* dy = p.dy.row(row) + group * (heads - 1) * p.head_dim + col;
    Pack<float, kWidth> sum{};
    for (int h = 0; h < heads; ++h) {
      const auto x = load_floats<kWidth>(dy + int64_t{h} * p.head_dim);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum[i] += x[i];
    }
    return sum;
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Pack<float, kWidth>& sum) const {
    store_floats(p.dx.row(row) + col, sum);
  }
};

}  // namespace

void launch(cudaStream_t stream, const RepeatHeads& p) {
  const bool vectors = p.head_dim % 8 == 0 && vectors_fit<8>(p.y, p.x);
  launch_elementwise<8>(stream, "repeat_heads", p.rows, int64_t{p.heads} * p.head_dim, vectors,
                        RepeatHeadsOp{p});
}

void launch(cudaStream_t stream, const RepeatHeadsBackward& p) {
  const bool vectors = p.head_dim % 8 == 0 && vectors_fit<8>(p.dx, p.dy);
  launch_elementwise<8>(stream, "repeat_heads_backward", p.rows, int64_t{p.groups} * p.head_dim,
                        vectors, RepeatHeadsBackwardOp{p});
}

}  // namespace sbtrain::kernels
