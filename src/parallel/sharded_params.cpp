#include "parallel/sharded_params.h"

#include <algorithm>

#include "core/error.h"
#include "ops/memory.h"
#include "ops/optimizer.h"

namespace sbtrain {
namespace {

// The elements with weight decay among storage elements [begin, end) of the unit, counted from
// `begin`; neighbours joined.
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
  Memory& memory = s.memory();
  for (size_t u = 0; u < registry.units().size(); ++u) {
    const ParamUnit& spec = registry.units()[u];
    Unit unit;
    unit.shard.size = spec.size / communicator.world();
    unit.shard.begin = unit.shard.size * communicator.rank();
    unit.shard.decays = decay_ranges(spec, unit.shard.begin, unit.shard.begin + unit.shard.size);
    const auto allocate = [&](MemoryClass c, const char* what) {
      return memory.allocate(c, spec.prefix + what, DType::kF32, {unit.shard.size});
    };
    unit.master = allocate(MemoryClass::kWeights, "weights");
    unit.shard.master = unit.master;
    if (memory.compute_dtype() != DType::kF32) {
      unit.compute = memory.allocate(MemoryClass::kWeights, spec.prefix + "compute",
                                     memory.compute_dtype(), {spec.size});
    }
    const Buffer& seen = unit.compute.tensor().defined() ? unit.compute : unit.master;
    unit.weights = registry.view(static_cast<int>(u), seen);
    if (with_training) {
      unit.gradient = allocate(MemoryClass::kGradients, "gradients");
      unit.moment1 = allocate(MemoryClass::kOptimizer, "moment1");
      unit.moment2 = allocate(MemoryClass::kOptimizer, "moment2");
      unit.shard.gradient = unit.gradient;
      unit.shard.moment1 = unit.moment1;
      unit.shard.moment2 = unit.moment2;
      unit.gradients = registry.view(static_cast<int>(u), unit.gradient);
    }
    units_.push_back(std::move(unit));
  }
}

// In a world of one every unit is whole already: there is nothing to move.
void ShardedParams::gather(int unit) {
  ++units_.at(unit).users;
  units_[unit].state = State::kGathered;
}

const Weights& ShardedParams::get(int unit) {
  require(units_.at(unit).state == State::kGathered, "unit {} is used before it is gathered", unit);
  return units_[unit].weights;
}

void ShardedParams::release(int unit) {
  Unit& u = units_.at(unit);
  require(u.users > 0, "unit {} is released more often than it was gathered", unit);
  if (--u.users == 0) u.state = State::kSharded;
}

const Weights& ShardedParams::gradients(int unit) {
  require(units_.at(unit).gradient.tensor().defined(), "unit {} has no gradients: not training",
          unit);
  return units_[unit].gradients;
}

void ShardedParams::reduce(int unit) {
  communicator_.reduce_scatter(stream_, units_.at(unit).shard.gradient, units_[unit].gradient);
}

void ShardedParams::initialize(uint64_t seed) {
  std::vector<float> host;
  for (size_t u = 0; u < units_.size(); ++u) {
    const Shard& shard = units_[u].shard;
    if (!stream_.planning()) {
      host.resize(shard.size);
      sbtrain::initialize(registry_.unit(static_cast<int>(u)), shard.begin,
                          shard.begin + shard.size, seed, host.data());
      ops::run(stream_, ops::CopyFromHost{.y = shard.master, .host = host.data()});
      ops::run(stream_, ops::Synchronize{});
    }
    if (!shard.moment1.defined()) continue;
    ops::run(stream_, ops::Fill{.x = shard.moment1, .value = 0.0f});
    ops::run(stream_, ops::Fill{.x = shard.moment2, .value = 0.0f});
  }
  refresh();
}

void ShardedParams::refresh() {
  for (const Unit& unit : units_) {
    if (unit.compute.tensor().defined())
      ops::run(stream_, ops::Copy{.y = unit.compute, .x = unit.master});
  }
}

void ShardedParams::zero_gradients() {
  for (const Unit& unit : units_) ops::run(stream_, ops::Fill{.x = unit.gradient, .value = 0.0f});
}

void ShardedParams::add_squared_gradient_norm(Tensor y_1) {
  for (const Unit& unit : units_)
    ops::run(stream_, ops::AddSquaredNorm{.y_1 = y_1, .x = unit.shard.gradient});
}

void ShardedParams::update(ops::AdamW adamw) {
  for (const Unit& unit : units_) {
    adamw.w_N = unit.shard.master;
    adamw.m_N = unit.shard.moment1;
    adamw.v_N = unit.shard.moment2;
    adamw.grad_N = unit.shard.gradient;
    adamw.compute_N = unit.compute;
    adamw.decays = unit.shard.decays;
    ops::run(stream_, adamw);
  }
}

}  // namespace sbtrain
