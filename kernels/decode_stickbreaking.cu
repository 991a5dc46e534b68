#include "kernels/decode.cuh"

namespace sbtrain::kernels {
namespace {

using namespace decoding;

// The parts of the stick that one key takes and leaves, by its logit times log2(e). Neither is
// computed by a subtraction that cancels.
struct Break {
  float beta, rest;
};
__device__ inline Break break_at(float z, float gate) {
  const float e = exp2_ftz(-fabsf(z));
  const float large = reciprocal_ftz(1.0f + e);
  const float small = e * large;
  const float sigma = z > 0.0f ? large : small;
  const float complement = z > 0.0f ? small : large;
  return {gate * sigma, (1.0f - gate) + gate * complement};
}

// The gates of the keys of a head, where there are any.
template <bool kPaged>
struct GateRows {
  __device__ GateRows(const StickBreakingDecode& p, const CachedHead<false>& head)
      : gates(p.gate_cache), stride(p.t.heads) {
    if (gates != nullptr) gates += head.batch * p.t.capacity * stride + head.head;
  }
  __device__ bool any() const { return gates != nullptr; }
  __device__ float of(int i) const { return gates[int64_t{i} * stride]; }
  const float* gates;
  int stride;  // from key to key
};
template <>
struct GateRows<true> {
  __device__ GateRows(const StickBreakingDecode& p, const CachedHead<true>& head)
      : pages(head.rows.of_head),
        keys(2 * kPageKeys * head.rows.width),
        group(p.t.heads / p.t.key_heads),
        head(head.head - head.key_head * group) {}
  __device__ static bool any() { return true; }
  __device__ float of(int i) const {
    const auto* const gates =
        reinterpret_cast<const float*>(static_cast<const bf16*>(page_of(pages, i)) + keys);
    return gates[i % kPageKeys * group + head];
  }
  const int64_t* pages;
  int keys;   // elements of keys and values in front of a page's gates
  int group;  // gates of a key
  int head;   // in its group
};

// A group breaks the stick as if it were whole when it comes to the group's keys; what the newer
// keys leave of it is multiplied in at the end. The part of the stick that a group sees is never
// shorter than the true one, so it is safe to compare it with skip_epsilon.
template <bool kInPages>
struct StickBreaking {
  static constexpr Compiled kCompiled = Compiled::kTuned;
  static constexpr bool kPaged = kInPages;
  using Head = CachedHead<kPaged>;
  StickBreakingDecode p;

  __device__ Range seen(const Head& head) const {
    return {0, p.attend_current ? head.length : head.length - 1};
  }
  template <int kLanes>
  struct Attend {
    GateRows<kPaged> gates;
    float skip_epsilon;
    Part part{1.0f, 0.0f};
    __device__ Attend(const StickBreaking& of, const Head& head, int)
        : gates(of.p, head), skip_epsilon(of.p.skip_epsilon) {}
    template <int kKeys>
    __device__ void add(const Channels& q, const Batch<kKeys>& batch, int newest, int oldest,
                        Channels& o) {
      float gate[kKeys];
#pragma unroll
      for (int b = 0; b < kKeys; ++b) gate[b] = 1.0f;
      if (gates.any()) {
#pragma unroll
        for (int b = 0; b < kKeys; ++b) {
          if (newest - b >= oldest) gate[b] = gates.of(newest - b);
        }
      }
      Break pieces[kKeys];
#pragma unroll
      for (int b = 0; b < kKeys; ++b) {
        const float z = q.dot<kLanes>(batch.k[b].channels(), 0.0f);
        // A logit of -infinity takes nothing of the stick.
        pieces[b] = break_at(newest - b >= oldest ? z : -kInfinity, gate[b]);
      }
#pragma unroll
      for (int b = 0; b < kKeys; ++b) {
        o.add(pieces[b].beta * part.a, batch.v[b].channels());
        part.a *= pieces[b].rest;
      }
    }
    __device__ bool complete() const {
      return part.a < skip_epsilon;
    }
  };
  // Adds what the next older keys give.
  static __device__ void join(Part& part, Channels& o, const Part& older, const Channels& older_o) {
    o.add(part.a, older_o);
    part.a *= older.a;
  }
  struct Total {
    Part part{1.0f, 0.0f};
    float y = 0.0f;
    __device__ void add(const Part& other, float other_y) {
      y += part.a * other_y;
      part.a *= other.a;
    }
  };
  __device__ bool complete(const Total& total) const {
    return total.part.a < p.skip_epsilon;
  }
  __device__ float result(const Head& head, const Total& total, int c) const {
    float y = total.y;
    if (p.remainder_value) y += total.part.a * to_float(head.own_v(p.t)[c]);
    if (p.remainder_bias != nullptr) {
      y += total.part.a * to_float(p.remainder_bias[head.head * p.t.head_dim + c]);
    }
    return y;
  }
};

}  // namespace

void stickbreaking_decode(cudaStream_t stream, const StickBreakingDecode& p) {
  if (p.t.pages.data != nullptr) {
    decode("stickbreaking_kept_decode", stream, StickBreaking<true>{p});
  } else {
    decode("stickbreaking_decode", stream, StickBreaking<false>{p});
  }
}

}  // namespace sbtrain::kernels
