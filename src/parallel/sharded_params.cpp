#include "parallel/sharded_params.h"

#include <algorithm>

#include "core/error.h"
#include "ops/memory.h"
#include "ops/optimizer.h"

namespace sbtrain {
namespace {

// The elements with weight decay among storage elements [begin, end) of the unit, counted from
// `begin`; adjacent ranges are joined.
std::vector<ops::DecayRange> decay_ranges(const ParamUnit& unit, int64_t begin, int64_t end) {
  std::vector<ops::DecayRange> ranges;
  for (const PlacedTensor& tensor : unit.tensors) {
    const int64_t first = std::max(tensor.offset, begin);
    const int64_t last = std::min(tensor.offset + tensor.stored, end);
    if (!tensor.spec.decay || first >= last) continue;
    if (!ranges.empty() && ranges.back().end == first - begin) {
      ranges.back().end = last - begin;
    } else {
      ranges.push_back({first - begin, last - begin});
    }
  }
  return ranges;
}

}  // namespace

ShardedParams::ShardedParams(const ParamRegistry& registry, Stream& s, Communicator& communicator,
                             bool with_training)
    : registry_(registry), stream_(s), communicator_(communicator) {
  require(communicator.world() == 1, "sharding over {} ranks needs a distributed communicator",
          communicator.world());
  for (size_t u = 0; u < registry.units().size(); ++u) {
    units_.push_back(make_unit(static_cast<int>(u), with_training));
  }
}

ShardedParams::Unit ShardedParams::make_unit(int index, bool with_training) {
  Memory& memory = stream_.memory();
  const ParamUnit& spec = registry_.unit(index);
  Unit unit;
  Shard& shard = unit.shard;
  shard.size = spec.size / communicator_.world();
  shard.begin = shard.size * communicator_.rank();
  shard.decays = decay_ranges(spec, shard.begin, shard.begin + shard.size);
  const auto allocate = [&](MemoryClass c, const char* what) {
    return memory.allocate(c, spec.prefix + what, DType::kF32, {shard.size});
  };
  const bool copies = memory.compute_dtype() != DType::kF32;
  if (copies) {
    unit.compute = memory.allocate(MemoryClass::kWeights, spec.prefix + "compute",
                                   memory.compute_dtype(), {spec.size});
    shard.weights = unit.compute.tensor().row_range(shard.begin, shard.size);
  }
  if (with_training || !copies) {
    unit.master = allocate(MemoryClass::kWeights, "weights");
    shard.weights = unit.master;
  }
  unit.weights = registry_.view(index, copies ? unit.compute : unit.master);
  if (!with_training) return unit;
  unit.gradient = allocate(MemoryClass::kGradients, "gradients");
  unit.moment1 = allocate(MemoryClass::kOptimizer, "moment1");
  unit.moment2 = allocate(MemoryClass::kOptimizer, "moment2");
  shard.gradient = unit.gradient;
  shard.moment1 = unit.moment1;
  shard.moment2 = unit.moment2;
  unit.gradients = registry_.view(index, unit.gradient);
  return unit;
}

// ---- A unit in a step. In a world of one every unit is whole already, and nothing moves.

void ShardedParams::gather(int unit) {
  Unit& u = units_.at(unit);
  require(!u.gathered, "the unit of '{}' is gathered again before its release", name(unit));
  u.gathered = true;
}

const Weights& ShardedParams::get(int unit) {
  require(units_.at(unit).gathered, "the unit of '{}' is used without a gather", name(unit));
  return units_[unit].weights;
}

void ShardedParams::release(int unit) {
  Unit& u = units_.at(unit);
  require(u.gathered, "the unit of '{}' is released without a gather", name(unit));
  u.gathered = false;
}

const Weights& ShardedParams::gradients(int unit) {
  Unit& u = units_.at(unit);
  require(u.gradient.tensor().defined(), "the unit of '{}' has no gradients outside training",
          name(unit));
  u.open = true;
  return u.gradients;
}

void ShardedParams::reduce(int unit) {
  Unit& u = units_.at(unit);
  require(u.open, "the gradients of the unit of '{}' are reduced before they are formed",
          name(unit));
  communicator_.reduce_scatter(stream_, u.shard.gradient, u.gradient);
  u.open = false;
}

// ---- All shards at once

void ShardedParams::require_at_rest(const char* what) const {
  for (size_t u = 0; u < units_.size(); ++u) {
    if (!units_[u].gathered && !units_[u].open) continue;
    fail(ExitCode::kInternal, "{} while the unit of '{}' {}", what, name(static_cast<int>(u)),
         units_[u].gathered ? "is gathered" : "has gradients that are not reduced");
  }
}

void ShardedParams::initialize(uint64_t seed) {
  require_at_rest("weights change");
  for (size_t u = 0; u < units_.size(); ++u) {
    const Shard& shard = units_[u].shard;
    sbtrain::initialize(registry_.unit(static_cast<int>(u)), shard.begin, seed, stream_,
                        shard.weights);
    if (!shard.moment1.defined()) continue;
    ops::run(stream_, ops::Fill{.x = shard.moment1, .value = 0.0f});
    ops::run(stream_, ops::Fill{.x = shard.moment2, .value = 0.0f});
  }
  refresh();
}

void ShardedParams::refresh() {
  require_at_rest("weights change");
  for (const Unit& unit : units_) {
    const bool copies = unit.master.tensor().defined() && unit.compute.tensor().defined();
    if (copies) ops::run(stream_, ops::Copy{.y = unit.compute, .x = unit.master});
  }
}

void ShardedParams::zero_gradients() {
  require_at_rest("gradients are cleared");
  for (const Unit& unit : units_) ops::run(stream_, ops::Fill{.x = unit.gradient, .value = 0.0f});
}

void ShardedParams::add_squared_gradient_norm(Tensor y_1) {
  require_at_rest("gradients are measured");
  for (const Unit& unit : units_) {
    ops::run(stream_, ops::AddSquaredNorm{.y_1 = y_1, .x = unit.shard.gradient});
  }
}

void ShardedParams::update(ops::AdamW adamw) {
  require_at_rest("weights change");
  for (const Unit& unit : units_) {
    adamw.w_N = unit.shard.weights;
    adamw.m_N = unit.shard.moment1;
    adamw.v_N = unit.shard.moment2;
    adamw.grad_N = unit.shard.gradient;
    adamw.compute_N = unit.compute;
    adamw.decays = unit.shard.decays;
    ops::run(stream_, adamw);
  }
}

void upload(Stream& s, Tensor to, const float* host) {
  if (to.dtype == DType::kF32) return ops::run(s, ops::CopyFromHost{.y = to, .host = host});
  require(to.contiguous(), "upload: {} is not contiguous", to.describe());
  constexpr int64_t kPart = int64_t{1} << 24;  // elements: 64 MiB in addition to the weights
  for (int64_t begin = 0; begin < to.numel(); begin += kPart) {
    const Tensor part = to.row_range(begin, std::min(kPart, to.numel() - begin));
    const Buffer values =
        s.memory().allocate(MemoryClass::kScratch, "upload", DType::kF32, {part.numel()});
    ops::run(s, ops::CopyFromHost{.y = values, .host = host + begin});
    ops::run(s, ops::Copy{.y = part, .x = values});
  }
}

}  // namespace sbtrain
