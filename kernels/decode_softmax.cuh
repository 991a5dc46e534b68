// Softmax attention of one new token to its cache, with a bias on the logits or without.
#pragma once

#include <utility>

#include "kernels/decode.cuh"

namespace sbtrain::kernels::decoding {

// A Bias is what is added to the logit of the key `distance` tokens before the query, as the sum
// over the lanes of a group; of_head<kLanes>(head, position of the query, lane) creates it.
template <typename Bias>
struct Softmax {
  static constexpr Compiled kCompiled = Bias::kCompiled;
  static constexpr bool kPaged = false;
  using Head = CachedHead<kPaged>;
  SoftmaxDecode p;
  Bias biases;

  __device__ Range seen(const Head& head) const {
    const bool all = p.window <= 0 || p.window >= head.length;
    return {all ? 0 : head.length - static_cast<int>(p.window), head.length};
  }
  template <int kLanes>
  struct Attend {
    decltype(std::declval<const Bias&>().template of_head<kLanes>(0, 0, 0)) bias;
    int last;  // the newest key
    Part part{-FLT_MAX, 0.0f};
    __device__ Attend(const Softmax& of, const Head& head, int lane)
        : bias(of.biases.template of_head<kLanes>(head.head, head.length - 1, lane)),
          last(head.length - 1) {}
    template <int kKeys>
    __device__ void add(const Channels& q, const Batch<kKeys>& batch, int newest, int oldest,
                        Channels& o) {
      float z[kKeys];
#pragma unroll
      for (int b = 0; b < kKeys; ++b) {
        z[b] = q.dot<kLanes>(batch.k[b].channels(), bias(last - max(newest - b, oldest)));
        if (newest - b < oldest) z[b] = -kInfinity;
      }
      // Two at a time for one correction of what has been added up.
      static_assert(kKeys % 2 == 0);
#pragma unroll
      for (int b = 0; b < kKeys; b += 2) {
        const float larger = fmaxf(part.a, fmaxf(z[b], z[b + 1]));
        const float rescale = exp2_ftz(part.a - larger);
        const float newer = exp2_ftz(z[b] - larger);
        const float older = exp2_ftz(z[b + 1] - larger);
        part.a = larger;
        part.b = fmaf(part.b, rescale, newer + older);
        o.scale(rescale);
        o.add(newer, batch.v[b].channels());
        o.add(older, batch.v[b + 1].channels());
      }
    }
    __device__ bool complete() const {
      return false;
    }
  };
  // Adds what the next older keys give.
  static __device__ void join(Part& part, Channels& o, const Part& older, const Channels& older_o) {
    const float larger = fmaxf(part.a, older.a);
    const float mine = exp2_ftz(part.a - larger);
    const float theirs = exp2_ftz(older.a - larger);
    part = {larger, fmaf(part.b, mine, older.b * theirs)};
    o.scale(mine);
    o.add(theirs, older_o);
  }
  // The sum of what parts give, from the newest to the oldest.
  struct Total {
    Part part{-FLT_MAX, 0.0f};
    float y = 0.0f;  // of one channel
    __device__ void add(const Part& other, float other_y) {
      const float larger = fmaxf(part.a, other.a);
      const float mine = exp2_ftz(part.a - larger);
      const float theirs = exp2_ftz(other.a - larger);
      part = {larger, fmaf(part.b, mine, other.b * theirs)};
      y = fmaf(y, mine, other_y * theirs);
    }
  };
  __device__ bool complete(const Total&) const {
    return false;
  }
  __device__ float result(const Head&, const Total& total, int) const {
    return total.y / total.part.b;
  }
};

}  // namespace sbtrain::kernels::decoding
