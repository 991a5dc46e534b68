#include "parallel/fp8_weights.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "ops/fp8.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

// What part of a unit may lie outside of matrices in fp8, since every rank keeps it.
constexpr int64_t kMostOthers = 8;

// All of the unit that no range of matrices holds.
std::vector<ElementRange> between(const std::vector<Fp8Range>& ranges, int64_t size) {
  std::vector<ElementRange> others;
  int64_t begin = 0;
  for (const Fp8Range& range : ranges) {
    if (begin < range.begin) others.push_back({begin, range.begin});
    begin = range.end;
  }
  if (begin < size) others.push_back({begin, size});
  return others;
}

int64_t elements(const std::vector<ElementRange>& ranges) {
  int64_t n = 0;
  for (const ElementRange& range : ranges) n += range.end - range.begin;
  return n;
}

// What of `range` lies in the shard, as elements of the unit; empty: begin >= end.
ElementRange part_of(const ElementRange& range, int64_t begin, int64_t size) {
  return {std::max(range.begin, begin), std::min(range.end, begin + size)};
}

// A flat range as a matrix, of which a kernel casts square tiles.
Tensor as_matrix(const Tensor& x) {
  constexpr int64_t kColumns = 64;
  return x.reshaped({x.numel() / kColumns, kColumns});
}

}  // namespace

Fp8Weights::Fp8Weights(const ParamRegistry& registry, Stream& s, const Mesh& mesh, bool whole)
    : registry_(registry), stream_(s), mesh_(mesh), whole_(whole) {
  int64_t others = 0;
  for (size_t u = 0; u < registry.units().size(); ++u) {
    const ParamUnit& spec = registry.units()[u];
    std::vector<Fp8Range> ranges = fp8_ranges(spec);
    if (elements(between(ranges, spec.size)) * kMostOthers > spec.size) continue;
    add(static_cast<int>(u), spec, std::move(ranges));
    Unit& unit = units_.back();
    unit.first_other = others;
    others += elements(unit.others);
  }
  Memory& memory = s.memory();
  const auto numbers = [&](const char* name, std::initializer_list<int64_t> shape) {
    return memory.allocate(MemoryClass::kWeights, name, DType::kF32, shape);
  };
  others_ = memory.allocate(MemoryClass::kWeights, "weights outside of matrices",
                            memory.compute_dtype(), {others});
  amax_WN_ = numbers("amax of ranks", {mesh.shard_count() * ranges_});
  amax_N_ = numbers("amax of matrices", {ranges_});
  inverse_scale_N_ = numbers("inverse scales of matrices", {ranges_, kFp8ScaleStride});
}

void Fp8Weights::add(int index, const ParamUnit& spec, std::vector<Fp8Range> ranges) {
  Unit unit{.index = index, .ranges = std::move(ranges)};
  unit.others = between(unit.ranges, spec.size);
  unit.first_range = ranges_;
  ranges_ += static_cast<int64_t>(unit.ranges.size());
  unit.size = spec.size / mesh_.shard_count();
  unit.begin = unit.size * mesh_.shards().rank();
  const auto allocate = [&](const char* what, int64_t n) {
    return stream_.memory().allocate(MemoryClass::kWeights, spec.prefix + what, DType::kE4M3, {n});
  };
  unit.matrices = allocate("fp8", whole_ ? spec.size : unit.size);
  if (whole_) unit.transposed = allocate("fp8 transposed", spec.size);
  units_.push_back(std::move(unit));
}

int Fp8Weights::find(int unit) const {
  const auto found = std::ranges::find(units_, unit, &Unit::index);
  return found == units_.end() ? -1 : static_cast<int>(found - units_.begin());
}

Tensor Fp8Weights::shard(int n) const {
  const Unit& unit = units_[n];
  const Tensor& matrices = unit.matrices;
  return whole_ ? matrices.row_range(unit.begin, unit.size) : matrices;
}

Tensor Fp8Weights::inverse_scale(const Unit& unit, size_t range) const {
  const int64_t n = unit.first_range + static_cast<int64_t>(range);
  return inverse_scale_N_.tensor()
      .reshaped({ranges_ * kFp8ScaleStride})
      .row_range(n * kFp8ScaleStride, 1);
}

Tensor Fp8Weights::matrix(const Unit& unit, size_t i) const {
  const Fp8Range& range = unit.ranges[i];
  return unit.matrices.tensor()
      .row_range(range.begin, range.end - range.begin)
      .reshaped({range.rows, range.cols});
}

Tensor Fp8Weights::transposed(const Unit& unit, size_t i) const {
  const Fp8Range& range = unit.ranges[i];
  return unit.transposed.tensor()
      .row_range(range.begin, range.end - range.begin)
      .reshaped({range.cols, range.rows});
}

Weights Fp8Weights::view(int n, const Tensor& matrices) const {
  const Unit& unit = units_[n];
  Weights weights;
  for (const PlacedTensor& tensor : registry_.unit(unit.index).tensors) {
    const auto holds = [&](const ElementRange& range) {
      return range.begin <= tensor.offset && tensor.offset < range.end;
    };
    Tensor flat = matrices.row_range(tensor.offset, tensor.stored);
    int64_t at = unit.first_other;
    for (const ElementRange& other : unit.others) {
      if (holds(other)) {
        flat = others_.tensor().row_range(at + tensor.offset - other.begin, tensor.stored);
      }
      at += other.end - other.begin;
    }
    weights.add(tensor.spec.name, Tensor(flat.data, flat.dtype, tensor.spec.stored()));
  }
  for (size_t i = 0; i < unit.ranges.size(); ++i) {
    weights.set_fp8(unit.ranges[i].first, {.inverse_scale_1 = inverse_scale(unit, i),
                                           .transposed = whole_ ? transposed(unit, i) : Tensor()});
  }
  return weights;
}

// What a rank has no part of counts as zeros, which change neither a largest element nor a sum.
void Fp8Weights::measure(const std::vector<Tensor>& masters) {
  const Tensor mine_N = amax_WN_.tensor().row_range(mesh_.shards().rank() * ranges_, ranges_);
  ops::run(stream_, ops::Fill{.x = mine_N, .value = 0.0f});
  if (mesh_.sharded()) ops::run(stream_, ops::Fill{.x = others_, .value = 0.0f});
  for (size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = units_[u];
    const auto of = [&](const ElementRange& part) {
      return masters[u].row_range(part.begin - unit.begin, part.end - part.begin);
    };
    for (size_t i = 0; i < unit.ranges.size(); ++i) {
      const ElementRange part = part_of(unit.ranges[i], unit.begin, unit.size);
      if (part.begin >= part.end) continue;
      const int64_t n = unit.first_range + static_cast<int64_t>(i);
      ops::run(stream_, ops::Amax{.amax_1 = mine_N.row_range(n, 1), .x_RC = as_matrix(of(part))});
    }
    int64_t at = unit.first_other;
    for (const ElementRange& other : unit.others) {
      const ElementRange part = part_of(other, unit.begin, unit.size);
      if (part.begin < part.end) {
        const Tensor to =
            others_.tensor().row_range(at + part.begin - other.begin, part.end - part.begin);
        ops::run(stream_, ops::Copy{.y = to, .x = of(part)});
      }
      at += other.end - other.begin;
    }
  }
}

void Fp8Weights::exchange(Stream& communication) {
  Communicator& ranks = mesh_.shards();
  ranks.all_gather(communication, amax_WN_,
                   amax_WN_.tensor().row_range(ranks.rank() * ranges_, ranges_));
  ranks.all_reduce(communication, others_);
}

void Fp8Weights::cast(const std::vector<Tensor>& masters) {
  ops::run(stream_,
           ops::Fp8Scales{.amax_N = amax_N_,
                          .inverse_scale_N1 = inverse_scale_N_.tensor().col_range(0, 1),
                          .x_WN = amax_WN_.tensor().reshaped({mesh_.shard_count(), ranges_})});
  for (size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = units_[u];
    for (size_t i = 0; i < unit.ranges.size(); ++i) {
      const Fp8Range& range = unit.ranges[i];
      const ElementRange part = part_of(range, unit.begin, unit.size);
      if (part.begin >= part.end) continue;
      const auto of = [&](const Tensor& shard) {
        return shard.row_range(part.begin - unit.begin, part.end - part.begin);
      };
      const int64_t n = unit.first_range + static_cast<int64_t>(i);
      ops::CastFp8 cast{.inverse_scale_1 = inverse_scale(unit, i),
                        .x_RC = {},
                        .amax_1 = amax_N_.tensor().row_range(n, 1)};
      if (mesh_.sharded()) {
        cast.y_RC = as_matrix(of(shard(static_cast<int>(u))));
        cast.x_RC = as_matrix(of(masters[u]));
      } else {
        cast.y_RC = matrix(unit, i);
        cast.y_CR = transposed(unit, i);
        cast.x_RC = of(masters[u]).reshaped({range.rows, range.cols});
      }
      ops::run(stream_, cast);
    }
  }
}

void Fp8Weights::transpose(int n) {
  const Unit& unit = units_[n];
  for (size_t i = 0; i < unit.ranges.size(); ++i) {
    ops::run(stream_, ops::TransposeFp8{.y_CR = transposed(unit, i), .x_RC = matrix(unit, i)});
  }
}

}  // namespace sbtrain
