// The score of plain softmax attention: the scaled product.
//
// A score function says how products q.k become scores, in units of ln 2 (probabilities are
// 2^(score - ...)). It is a copyable struct, `policy` to the main loops, with two classes:
// QueryRows for tiles whose rows are queries and whose columns are keys, Shape::kQueries x
// Shape::kKeys of a block, and KeyRows for tiles of keys and queries. A warp makes one for its rows
// of a block, of which TileCoordinates say where it stands. Masks come after scores, so pairs that
// do not see each other may get any number. kOfHead says whether scores depend on the head. Both
// have
//   stage_bytes()                  shared memory for what they need to know of a tile's columns
//   load(group, stage, begin)      copies that for the columns from `begin` on, asynchronously; by
//                                  all threads of the group
//   enter(stage, begin)            the next tile is the warp's own of the columns from `begin` on
//   score(s)                       products become scores
// KeyRows also has, to compute the gradients of what the policy learns from those of the scores (in
// nats):
//   shared_bytes()                 shared memory of the gradient
//   begin_gradient(group, shared)  before the first tile of a block
//   add_gradient(ds)               for each tile that was scored
//   end_gradient(group)            after the last one; by all threads of the group
#pragma once

#include "kernels/attention/coordinates.cuh"

namespace sbtrain::kernels {

// What score functions without columns of their own and without gradients share.
struct NothingStaged {
  static constexpr int stage_bytes() { return 0; }
  template <typename Group>
  __device__ __forceinline__ void load(const Group&, void*, int) {}
};
struct NoGradient : NothingStaged {
  static constexpr int shared_bytes() { return 0; }
  template <typename Group>
  __device__ __forceinline__ void begin_gradient(const Group&, void*) {}
  template <typename Tile>
  __device__ __forceinline__ void add_gradient(Tile&) {}
  template <typename Group>
  __device__ __forceinline__ void end_gradient(const Group&) {}
};

struct ScaledScore {
  static constexpr bool kOfHead = false;
  // Whether the rows of gradients must add up to 0 to the precision of f32. Without a correction
  // they do not, since delta is computed from o, which is rounded to bf16.
  static constexpr bool kExactDelta = false;
  float scale_log2;

  template <typename Base>
  struct Rows : Base {
    __device__ __forceinline__ Rows(const ScaledScore& policy, const TileCoordinates&)
        : scale_log2(policy.scale_log2) {}
    __device__ __forceinline__ void enter(const void*, int) {}
    template <typename Tile>
    __device__ __forceinline__ void score(Tile& s) {
      s.for_each([&](float& x, auto) { x *= scale_log2; });
    }
    float scale_log2;
  };
  template <typename Shape>
  using QueryRows = Rows<NothingStaged>;
  template <typename Shape>
  using KeyRows = Rows<NoGradient>;
};

}  // namespace sbtrain::kernels
