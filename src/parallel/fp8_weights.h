// The weights of units whose matrices are held in e4m3, made of the master weights' shards.
//
// A matrix, or several that are one product, has one scale, by its largest element on all ranks
// (ops/fp8.h). The elements of a unit that are in no such matrix (norms, biases, gates) are few;
// every rank keeps them whole, so that a gather is of one array of one type. A unit with more than
// an eighth of such elements stays as it is without fp8: its layers cast at each use.
//
// Once after every update:
//   measure    the largest elements of this rank's parts; its part of the other elements
//   exchange   both over the ranks of the shards: one gather of a number a matrix, one sum
//   cast       scales, and this rank's shards in e4m3
// and, where weights are whole after that, the transposes that backward products read.
#pragma once

#include <vector>

#include "core/memory.h"
#include "core/stream.h"
#include "model/params.h"
#include "parallel/mesh.h"

namespace sbtrain {

class Fp8Weights {
 public:
  // `whole`: a rank keeps whole matrices and their transposes, not only its shards.
  Fp8Weights(const ParamRegistry& registry, Stream& s, const Mesh& mesh, bool whole);

  bool empty() const { return units_.empty(); }
  // The number of a unit of the registry among those in fp8, by which the calls below name it; -1:
  // it is none.
  int find(int unit) const;

  // e4m3, of as many elements as the unit or its shard has, in the places that the matrices have
  // there; what lies between them is undefined. matrices() is there if they are kept whole.
  Tensor matrices(int n) const { return units_[n].matrices; }
  Tensor shard(int n) const;
  // The unit's tensors, of which the matrices lie in `matrices`.
  Weights view(int n, const Tensor& matrices) const;

  // `masters`: this rank's shards [size], f32, of the units in their order.
  void measure(const std::vector<Tensor>& masters);
  void exchange(Stream& communication);
  void cast(const std::vector<Tensor>& masters);
  // After the whole matrices have arrived, on the stream that computes.
  void transpose(int n);

 private:
  struct Unit {
    int index = 0;  // in the registry
    std::vector<Fp8Range> ranges;
    std::vector<ElementRange> others{};
    int64_t first_range = 0, first_other = 0;  // places in amax_N, and in others_
    int64_t size = 0, begin = 0;               // of the shard, in the unit
    Buffer matrices{}, transposed{};           // transposed: in the same places
  };
  void add(int index, const ParamUnit& spec, std::vector<Fp8Range> ranges);
  Tensor inverse_scale(const Unit& unit, size_t range) const;
  Tensor matrix(const Unit& unit, size_t range) const;
  Tensor transposed(const Unit& unit, size_t range) const;

  const ParamRegistry& registry_;
  Stream& stream_;
  const Mesh& mesh_;
  const bool whole_;
  std::vector<Unit> units_;
  int64_t ranges_ = 0;  // of all units
  Buffer others_;       // of all units, in the compute type
  // f32: [ranks of the shards * ranges], of which a rank fills its own part,
  // [ranges] and [ranges, kFp8ScaleStride].
  Buffer amax_WN_, amax_N_, inverse_scale_N_;
};

}  // namespace sbtrain
