#include "parallel/sharded_params.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "ops/average.h"
#include "ops/memory.h"
#include "ops/optimizer.h"

namespace sbtrain {
// Gradients of whole units that exist at once: one that is being formed, one that is being reduced.
constexpr size_t kReducing = 1;

ShardedParams::ShardedParams(const ParamRegistry& registry, Stream& s, const Mesh& mesh,
                             std::shared_ptr<const Optimizer> optimizer, ReduceType reduce,
                             TransferEngine reduce_engine, double ema, Precision precision)
    : registry_(registry),
      stream_(s),
      mesh_(mesh),
      optimizer_(std::move(optimizer)),
      reduce_(reduce),
      reduce_engine_(reduce_engine),
      ema_(ema),
      wait_times_(s) {
  if (mesh.world().world() > 1) {
    communication_.emplace(s.memory(), "communication", StreamPriority::kHigh);
  }
  if (precision == Precision::kFp8) {
    require(optimizer_ != nullptr, "weights are held in fp8 for training alone");
    fp8_.emplace(registry, s, mesh, /*whole=*/!gathers());
    if (fp8_->empty()) fp8_.reset();
  }
  for (size_t u = 0; u < registry.units().size(); ++u) {
    units_.push_back(make_unit(static_cast<int>(u)));
  }
  if (optimizer_) {
    matrices_ = std::make_unique<MatrixUpdate>(registry, *optimizer_, mesh, s, communication(),
                                               wait_times_);
    if (matrices_->groups().empty()) matrices_.reset();
  }
  if (!mesh.sharded()) return;
  for (const Tensor& region : s.memory().collective_regions()) {
    registered_.push_back(mesh.shards().register_memory(region));
  }
}

bool ShardedParams::has_copies() const {
  return stream_.memory().compute_dtype() != DType::kF32 || fetches();
}

ShardedParams::Unit ShardedParams::make_unit(int index) {
  Memory& memory = stream_.memory();
  const ParamUnit& spec = registry_.unit(index);
  Unit unit;
  Shard& shard = unit.shard;
  shard.size = spec.size / mesh_.shard_count();
  require(shard.size * mesh_.shard_count() == spec.size, "{} ranks do not divide {} elements",
          mesh_.shard_count(), spec.size);
  shard.begin = shard.size * mesh_.shards().rank();
  const auto allocate = [&](MemoryClass c, const char* what) {
    return memory.allocate(c, spec.prefix + what, DType::kF32, {shard.size});
  };
  unit.in_fp8 = fp8_ ? fp8_->find(index) : -1;
  if (has_copies() && unit.in_fp8 < 0) make_copies(spec, unit);
  if (optimizer_ || !has_copies()) {
    unit.master = allocate(MemoryClass::kWeights, "weights");
    shard.weights = unit.master;
    if (!has_copies() && unit.in_fp8 < 0) shard.compute = unit.master;
  }
  if (!gathers() && unit.in_fp8 < 0) {
    unit.weights = registry_.view(index, has_copies() ? unit.compute : unit.master);
  } else if (!gathers()) {
    unit.weights = fp8_->view(unit.in_fp8, fp8_->matrices(unit.in_fp8));
  }
  if (!optimizer_) return unit;
  unit.gradient = allocate(MemoryClass::kGradients, "gradients");
  shard.gradient = unit.gradient;
  if (ema_ > 0) unit.average = allocate(MemoryClass::kOptimizer, "average");
  shard.average = unit.average;
  shard.ranges = state_ranges(spec, *optimizer_, shard.begin, shard.size);
  make_states(spec, unit);
  return unit;
}

void ShardedParams::make_copies(const ParamUnit& spec, Unit& unit) {
  Memory& memory = stream_.memory();
  Shard& shard = unit.shard;
  unit.compute = memory.allocate(MemoryClass::kWeights, spec.prefix + "compute",
                                 memory.compute_dtype(), {gathers() ? shard.size : spec.size});
  shard.compute =
      gathers() ? unit.compute.tensor() : unit.compute.tensor().row_range(shard.begin, shard.size);
  shard.weights = shard.compute;
}

Tensor ShardedParams::gathered_shard(const Unit& unit) const {
  return unit.in_fp8 < 0 ? unit.shard.compute : fp8_->shard(unit.in_fp8);
}

// One array for each name of a state, in which the ranges that keep it follow each other, each from
// a multiple of 64 elements on.
void ShardedParams::make_states(const ParamUnit& spec, Unit& unit) {
  std::vector<std::pair<std::string, int64_t>> arrays;  // with their sizes
  const auto array_of = [&](const std::string& name) {
    auto found = std::ranges::find(arrays, name, &std::pair<std::string, int64_t>::first);
    return found != arrays.end() ? found : arrays.insert(found, {name, 0});
  };
  const auto place = [](int64_t& at, const StateRange& range) {
    return std::exchange(at, at + (range.size + 63) / 64 * 64);
  };
  for (const StateRange& range : unit.shard.ranges) {
    for (const std::string& name : range.names) place(array_of(name)->second, range);
  }
  for (auto& [name, size] : arrays) {
    unit.states.push_back(stream_.memory().allocate(MemoryClass::kOptimizer, spec.prefix + name,
                                                    DType::kF32, {size}));
    size = 0;
  }
  for (StateRange& range : unit.shard.ranges) {
    for (const std::string& name : range.names) {
      const auto array = array_of(name);
      const Tensor& all = unit.states[static_cast<size_t>(array - arrays.begin())];
      range.states.push_back(all.row_range(place(array->second, range), range.size));
    }
  }
}

// ---- A unit in a step. In a world of one every unit is whole already, and nothing moves.

// Collectives see, and may overwrite, what the compute stream was given before them.
void ShardedParams::start_communication() {
  Event now;
  stream_.record(now);
  communication_->wait(now);
}

void ShardedParams::gather(int unit) {
  Unit& u = units_.at(unit);
  require(!u.in_use, "the unit of '{}' is gathered again before its release", name(unit));
  u.in_use = true;
  u.awaited = mesh_.sharded();
  if (!gathers()) return;
  start_communication();
  const Tensor shard = gathered_shard(u);
  u.gathered = communication_->allocate(MemoryClass::kWeights, "gathered unit", shard.dtype,
                                        {registry_.unit(unit).size});
  mesh_.shards().all_gather(*communication_, u.gathered, shard);
  communication_->record(u.here);
  u.weights = u.in_fp8 < 0 ? registry_.view(unit, u.gathered) : fp8_->view(u.in_fp8, u.gathered);
}

const Weights& ShardedParams::get(int unit) {
  Unit& u = units_.at(unit);
  require(u.in_use, "the unit of '{}' is used without a gather", name(unit));
  if (u.awaited) {
    wait_times_.wait(u.here);
    if (gathers()) stream_.use(u.gathered);
    if (fetches() && u.in_fp8 >= 0) fp8_->transpose(u.in_fp8);
    u.awaited = false;
  }
  return u.weights;
}

void ShardedParams::release(int unit) {
  Unit& u = units_.at(unit);
  require(u.in_use, "the unit of '{}' is released without a gather", name(unit));
  u.gathered.release();
  u.in_use = false;
}

void ShardedParams::begin(MicroBatch micro_batch) {
  require_at_rest("a micro-batch begins");
  micro_batch_ = micro_batch;
}

const Weights& ShardedParams::gradients(int unit) {
  Unit& u = units_.at(unit);
  require(u.gradient.tensor().defined(), "the unit of '{}' has no gradients outside training",
          name(unit));
  if (u.open) return u.gradients;
  u.open = true;
  if (!mesh_.sharded()) return open_gradients(unit, u.gradient, micro_batch_.first);
  while (reducing_.size() > kReducing) {
    wait_times_.wait(reducing_.front());
    reducing_.pop_front();
  }
  u.formed = stream_.allocate(MemoryClass::kGradients, "gradients of a unit", DType::kF32,
                              {registry_.unit(unit).size});
  return open_gradients(unit, u.formed, /*fresh=*/true);
}

// Views of a unit's whole gradients. Those that hold nothing yet become zero, except where a
// product overwrites them.
const Weights& ShardedParams::open_gradients(int unit, const Tensor& whole, bool fresh) {
  Unit& u = units_[unit];
  u.gradients = registry_.view(unit, whole, fresh);
  if (!fresh) return u.gradients;
  for (const ElementRange& range : summed_ranges(registry_.unit(unit))) {
    ops::run(stream_,
             ops::Fill{.x = whole.row_range(range.begin, range.end - range.begin), .value = 0.0f});
  }
  return u.gradients;
}

void ShardedParams::reduce(int unit) {
  Unit& u = units_.at(unit);
  require(u.open, "the gradients of the unit of '{}' are reduced before they are formed",
          name(unit));
  u.open = false;
  const bool replicas = mesh_.replicas() && micro_batch_.last;
  if (!mesh_.sharded() && !replicas) return;
  if (mesh_.sharded() && reduce_engine_ == TransferEngine::kCopyEngines) {
    finish_exchange();  // of the unit before, which had this one's backward pass for it
    return start_exchange(u);
  }
  start_communication();
  if (mesh_.sharded()) reduce_shard(u);
  if (replicas) reduce_replicas(u);
  u.formed.release();
  Event done;
  communication_->record(done);
  reducing_.push_back(std::move(done));
}

// The shard's gradient = the sum over ranks of their whole gradients, or += after the first
// micro-batch. Whole gradients are lost.
void ShardedParams::reduce_shard(Unit& u) {
  Stream& s = *communication_;
  Communicator& ranks = mesh_.shards();
  const int64_t n = u.shard.size;
  s.use(u.formed);
  const Tensor part = u.formed.tensor().row_range(n * ranks.rank(), n);
  const bool direct = micro_batch_.first;  // the sum need not pass through `part`
  const Tensor& sum = direct ? u.shard.gradient : part;
  if (reduce_ == ReduceType::kFloat32) {
    ranks.reduce_scatter(s, sum, u.formed);
  } else {
    const Buffer rounded = s.allocate(MemoryClass::kGradients, "rounded gradients", DType::kBF16,
                                      {u.formed.tensor().numel()});
    const Tensor rounded_part = rounded.tensor().row_range(n * ranks.rank(), n);
    ops::run(s, ops::Copy{.y = rounded, .x = u.formed});
    ranks.reduce_scatter(s, rounded_part, rounded);
    ops::run(s, ops::Copy{.y = sum, .x = rounded_part});
  }
  if (!direct) ops::run(s, ops::Add{.y = u.shard.gradient, .x = part});
}

// The same by copies alone, so that nothing beside the compute stream needs multiprocessors. The
// compute stream adds the parts later, when they have long arrived.
void ShardedParams::start_exchange(Unit& u) {
  Exchange& exchange = exchange_.emplace();
  exchange.unit = &u;
  exchange.add = !micro_batch_.first;
  exchange.replicas = mesh_.replicas() && micro_batch_.last;
  if (reduce_ == ReduceType::kBfloat16) {
    exchange.mine = stream_.allocate(MemoryClass::kGradients, "rounded gradients", DType::kBF16,
                                     {u.formed.tensor().numel()});
    ops::run(stream_, ops::Copy{.y = exchange.mine, .x = u.formed});
    u.formed.release();
  } else {
    exchange.mine = std::move(u.formed);
  }
  exchange.parts =
      stream_.allocate(MemoryClass::kGradients, "gradients of all ranks",
                       exchange.mine.tensor().dtype, {mesh_.shard_count(), u.shard.size});
  start_communication();
  communication_->use(exchange.mine);
  communication_->use(exchange.parts);
  mesh_.shards().all_to_all(*communication_, exchange.parts, exchange.mine);
  communication_->record(exchange.done);
}

void ShardedParams::finish_exchange() {
  if (!exchange_) return;
  const Shard& shard = exchange_->unit->shard;
  wait_times_.wait(exchange_->done);
  ops::run(stream_,
           ops::SumParts{.y_N = shard.gradient,
                         .x_RN = exchange_->parts,
                         .own_N = exchange_->mine.tensor().row_range(shard.begin, shard.size),
                         .own = mesh_.shards().rank(),
                         .add = exchange_->add});
  if (exchange_->replicas) {
    start_communication();
    reduce_replicas(*exchange_->unit);
  }
  exchange_.reset();
}

void ShardedParams::reduce_replicas(Unit& u) {
  Stream& s = *communication_;
  if (reduce_ == ReduceType::kFloat32) return mesh_.replicas()->all_reduce(s, u.shard.gradient);
  const Buffer rounded =
      s.allocate(MemoryClass::kGradients, "rounded gradients", DType::kBF16, {u.shard.size});
  ops::run(s, ops::Copy{.y = rounded, .x = u.shard.gradient});
  mesh_.replicas()->all_reduce(s, rounded);
  ops::run(s, ops::Copy{.y = u.shard.gradient, .x = rounded});
}

void ShardedParams::join() {
  finish_exchange();
  reducing_.clear();
  if (!communication_) return;
  Event done;
  communication_->record(done);
  wait_times_.wait(done);
}

// ---- All shards at once

void ShardedParams::require_at_rest(const char* what) const {
  for (size_t u = 0; u < units_.size(); ++u) {
    if (!units_[u].in_use && !units_[u].open) continue;
    fail(ExitCode::kInternal, "{} while the unit of '{}' {}", what, name(static_cast<int>(u)),
         units_[u].in_use ? "is gathered" : "has gradients that are not reduced");
  }
}

void ShardedParams::initialize(uint64_t seed) {
  require_at_rest("weights change");
  for (size_t u = 0; u < units_.size(); ++u) {
    const Shard& shard = units_[u].shard;
    sbtrain::initialize(registry_.unit(static_cast<int>(u)), shard.begin, seed, stream_,
                        shard.weights);
    for (const Buffer& state : units_[u].states) {
      ops::run(stream_, ops::Fill{.x = state, .value = 0.0f});
    }
  }
  begin_average();
  refresh();
}

// Brings the whole unit from the ranks' compute shards; the next get() waits for it.
void ShardedParams::fetch(Unit& unit) {
  start_communication();
  const Tensor whole = unit.in_fp8 < 0 ? unit.compute.tensor() : fp8_->matrices(unit.in_fp8);
  mesh_.shards().all_gather(*communication_, whole, gathered_shard(unit));
  communication_->record(unit.here);
}

void ShardedParams::refresh() {
  require_at_rest("weights change");
  for (Unit& unit : units_) {
    if (unit.in_fp8 >= 0) continue;
    if (has_copies() && unit.master.tensor().defined()) {
      ops::run(stream_, ops::Copy{.y = unit.shard.compute, .x = unit.master});
    }
    if (fetches()) fetch(unit);
  }
  cast_to_fp8();
}

// Makes what is in fp8 of the master weights.
void ShardedParams::cast_to_fp8() {
  if (!fp8_) return;
  std::vector<Tensor> masters;  // of the units in fp8
  for (const Unit& unit : units_) {
    if (unit.in_fp8 >= 0) masters.push_back(unit.master);
  }
  fp8_->measure(masters);
  if (mesh_.sharded()) {
    start_communication();
    fp8_->exchange(*communication_);
    Event done;
    communication_->record(done);
    wait_times_.wait(done);
  }
  fp8_->cast(masters);
  if (!fetches()) return;
  for (Unit& unit : units_) {
    if (unit.in_fp8 >= 0) fetch(unit);
  }
}

void ShardedParams::add_squared_gradient_norm(Tensor y_1) {
  require_at_rest("gradients are measured");
  if (!mesh_.first_replica()) return;
  std::vector<Tensor> gradients;
  for (const Unit& unit : units_) gradients.push_back(unit.shard.gradient);
  ops::run(stream_, ops::AddSquaredNorms{.y_1 = y_1, .x = gradients});
}

FlatView ShardedParams::view(const Unit& unit, const StateRange& range) const {
  const auto part = [&](const Tensor& x) { return x.row_range(range.begin, range.size); };
  return {.weights = part(unit.shard.weights),
          .compute = has_copies() && unit.in_fp8 < 0 ? part(unit.shard.compute) : Tensor(),
          .gradient = part(unit.shard.gradient),
          .states = range.states,
          .decays = range.decays,
          .lr_factor = range.lr_factor};
}

void ShardedParams::update(const UpdateInputs& in) {
  require_at_rest("weights change");
  const auto units = static_cast<int>(units_.size());
  if (matrices_) {
    for (const MatrixGroup& group : matrices_->groups()) update_group(in, group);
    finish_groups(in);
  } else if (fetches()) {
    for (int u = 0; u < units; ++u) {
      update_flat(in, u, u + 1);
      finish_units(in, u, u + 1);  // the unit is fetched beside the update of the next one
    }
  } else {
    update_flat(in, 0, units);
    finish_units(in, 0, units);
  }
  cast_to_fp8();
}

// The flat ranges of units [begin, end).
void ShardedParams::update_flat(const UpdateInputs& in, int begin, int end) {
  std::vector<FlatView> views;
  for (int u = begin; u < end; ++u) {
    for (const StateRange& range : units_[u].shard.ranges) {
      if (range.matrix == nullptr) views.push_back(view(units_[u], range));
    }
  }
  by_rate(in, std::move(views), [&](const UpdateInputs& inputs, std::span<const FlatView> same) {
    optimizer_->update(stream_, inputs, same);
  });
}

// Sends the matrices of a group to their owners, beside which the flat ranges of its units are
// updated and the matrices of the group before it transformed. Alone, a rank has nothing to wait
// for, and holds one group at a time.
void ShardedParams::update_group(const UpdateInputs& in, const MatrixGroup& group) {
  matrices_->send(group, in, matrix_views(group));
  update_flat(in, group.begin, group.end);
  ++in_flight_;
  if (communication_ && in_flight_ < 2) return;
  matrices_->transform();
  if (communication_ && in_flight_ < kMatrixGroupsInFlight) return;
  finish_group(in);
}

void ShardedParams::finish_groups(const UpdateInputs& in) {
  if (in_flight_ > 0) matrices_->transform();
  while (in_flight_ > 0) finish_group(in);
}

void ShardedParams::finish_group(const UpdateInputs& in) {
  const MatrixGroup& group = matrices_->apply(in);
  --in_flight_;
  finish_units(in, group.complete_begin, group.complete_end);
}

// The new weights of units [begin, end) are there.
void ShardedParams::finish_units(const UpdateInputs& in, int begin, int end) {
  for (int u = begin; u < end; ++u) {
    const Shard& shard = units_[u].shard;
    if (shard.average.defined()) {
      ops::run(stream_, ops::AverageWeights{.a_N = shard.average,
                                            .w_N = shard.weights,
                                            .stats = in.stats,
                                            .decay = static_cast<float>(ema_)});
    }
    if (fetches() && units_[u].in_fp8 < 0) fetch(units_[u]);
  }
}

std::vector<MatrixView> ShardedParams::matrix_views(const MatrixGroup& group) {
  std::vector<MatrixView> views;
  for (const MatrixPiece& piece : group.pieces) {
    const Unit& unit = units_[piece.unit];
    const auto range = std::ranges::find(unit.shard.ranges, piece.tensor, &StateRange::matrix);
    require(range != unit.shard.ranges.end(), "'{}' is no matrix of this rank", piece.tensor->name);
    MatrixView& added = views.emplace_back();
    static_cast<FlatView&>(added) = view(unit, *range);
    added.spec = &piece.tensor->spec;
  }
  return views;
}

void ShardedParams::begin_average() {
  for (const Unit& unit : units_) {
    if (!unit.shard.average.defined()) continue;
    ops::run(stream_, ops::Copy{.y = unit.shard.average, .x = unit.shard.weights});
  }
}

void upload(Stream& s, Tensor to, const float* host) {
  if (to.dtype == DType::kF32) return ops::run(s, ops::CopyFromHost{.y = to, .host = host});
  require(to.contiguous(), "upload: {} is not contiguous", to.describe());
  constexpr int64_t kChunk = int64_t{1} << 24;  // elements: 64 MiB in addition to the weights
  for (int64_t begin = 0; begin < to.numel(); begin += kChunk) {
    const Tensor chunk = to.row_range(begin, std::min(kChunk, to.numel() - begin));
    const Buffer values =
        s.memory().allocate(MemoryClass::kScratch, "upload", DType::kF32, {chunk.numel()});
    ops::run(s, ops::CopyFromHost{.y = values, .host = host + begin});
    ops::run(s, ops::Copy{.y = chunk, .x = values});
  }
}

}  // namespace sbtrain
