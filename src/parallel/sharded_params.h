// Sharded parameters: what every rank keeps of a model, and how a step sees whole units.
//
// A unit (embedding, block, head) is one flat array; rank r of the W ranks that share it owns the
// r-th of W equal ranges, and it keeps only that range of master weights, gradients and the state
// of the optimizer (parallel/mesh.h says which ranks share). A step asks for whole units through
// gather / get / release and gives gradients back through gradients / reduce. The calls for a unit
// come in this order, and any other throws ExitCode::kInternal:
//   gather, get as often as needed, release
//   gradients as often as needed, reduce        independently of these
//   whatever reads or changes all shards        while no unit is gathered or has open gradients
//
// Collectives run on a stream of their own, beside the stream that computes. gather() starts when
// the work given to the compute stream before it is done, and get() is what makes that stream wait:
// so a unit is gathered while the one before it is used, if gather() is called before that use.
// Likewise reduce() runs beside what follows it. In a world of one the same calls move nothing.
//
// Where products are in fp8, a unit whose matrices take it is two arrays for those who read it: the
// matrices in e4m3, which is what gather() fetches, and the few other elements in the compute type,
// which every rank keeps whole. Both are made of the master weights once after every update
// (parallel/fp8_weights.h).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/memory.h"
#include "core/stream.h"
#include "model/params.h"
#include "optim/optimizer.h"
#include "parallel/fp8_weights.h"
#include "parallel/matrix_update.h"
#include "parallel/mesh.h"
#include "parallel/state_ranges.h"
#include "parallel/wait_times.h"

namespace sbtrain {

class ShardedParams : public ParamAccess {
 public:
  // With an optimizer, gradients and its state exist too. Without, which is inference, there are
  // only weights in the compute type. Contents are undefined until initialize() or a checkpoint
  // fills them. `reduce` is the type in which gradients travel, `reduce_engine` what adds them up.
  // The mesh must outlive the parameters, and the registry's units must be multiples of 64 elements
  // times the ranks that share them. With `ema` > 0 every update ends with a = ema a + (1 - ema) w
  // for the average a of the weights w. With Precision::kFp8 weights are held for products in fp8;
  // that is for training alone.
  ShardedParams(const ParamRegistry& registry, Stream& s, const Mesh& mesh,
                std::shared_ptr<const Optimizer> optimizer,
                ReduceType reduce = ReduceType::kFloat32,
                TransferEngine reduce_engine = TransferEngine::kMultiprocessors, double ema = 0,
                Precision precision = Precision::kBf16);

  // Which of a step's micro-batches the next backward pass is. The gradients of the first replace
  // those of the step before, later ones are added to them, and the last one's reduction makes
  // replicas equal. Without this call every pass is first and last.
  struct MicroBatch {
    bool first = true;
    bool last = true;
  };
  void begin(MicroBatch micro_batch);
  // The compute stream's later work runs after all collectives. A program (core/memory.h) that
  // gathers or reduces ends with it.
  void join();

  void gather(int unit) override;
  const Weights& get(int unit) override;
  void release(int unit) override;
  const Weights& gradients(int unit) override;
  void reduce(int unit) override;

  // The range of unit `u` that this rank owns: storage elements [begin, begin + size).
  struct Shard {
    int64_t begin = 0;
    int64_t size = 0;
    Tensor weights;  // [size] f32 for training, else of the compute type
    // [size] of the compute type; the weights if that is f32. Undefined where the unit's matrices
    // are in fp8.
    Tensor compute;
    Tensor gradient;                 // f32 [size], for training
    Tensor average;                  // f32 [size], of the weights, if it is kept
    std::vector<StateRange> ranges;  // the state of the optimizer, for training
  };
  const ParamRegistry& registry() const { return registry_; }
  const Mesh& mesh() const { return mesh_; }
  Stream& stream() const { return stream_; }
  // The stream of the collectives; null in a world of one.
  Stream* communication() { return communication_ ? &*communication_ : nullptr; }
  // How long the compute stream stood still for collectives.
  WaitTimes& wait_times() { return wait_times_; }
  const Shard& shard(int unit) const { return units_.at(unit).shard; }

  void initialize(uint64_t seed);  // weights by Philox, the state of the optimizer zero
  // The average begins with the weights.
  void begin_average();
  // To be called after the shards' weights have changed, so that get() shows the new ones.
  void refresh();
  // y_1 (f64) += the sum of the squares of this rank's gradients, so that y_1 summed over all ranks
  // is that of the model: of replicas only the first counts.
  void add_squared_gradient_norm(Tensor y_1);
  // Updates every shard and its compute copy by the optimizer.
  void update(const UpdateInputs& in);

 private:
  struct Unit {
    Buffer master, gradient, average;  // [shard.size], f32
    std::vector<Buffer> states;        // of the optimizer, one for each name, f32
    Buffer compute;   // weights in the compute type, unless they are the masters: the shard, or the
                      // whole unit if this rank keeps it
    int in_fp8 = -1;  // the unit's number among those in fp8_, or -1
    Buffer gathered;  // the whole unit from gather() to release(), if this rank keeps a shard
    Buffer formed;    // the whole unit's gradients from gradients() to reduce(), if sharded
    Shard shard;
    Weights weights, gradients;
    Event here;            // after it the whole unit is there
    bool awaited = false;  // get() must make the compute stream wait for `here`
    bool in_use = false;   // between gather() and release()
    bool open = false;     // between gradients() and reduce()
  };
  // A reduction by copies, between reduce() and the sum. (No member has an initializer, because
  // clang cannot make an optional of a nested class that has.)
  struct Exchange {
    Unit* unit;
    Buffer mine;    // the whole unit's gradients as they travel
    Buffer parts;   // of all other ranks: their gradients of this rank's shard
    bool add;       // to the gradients of earlier micro-batches
    bool replicas;  // are made equal after it
    Event done;
  };
  Unit make_unit(int index);
  void make_states(const ParamUnit& spec, Unit& unit);
  FlatView view(const Unit& unit, const StateRange& range) const;
  std::vector<MatrixView> matrix_views(const MatrixGroup& group);
  void update_flat(const UpdateInputs& in, int begin, int end);
  void update_group(const UpdateInputs& in, const MatrixGroup& group);
  void finish_groups(const UpdateInputs& in);
  void finish_group(const UpdateInputs& in);
  void finish_units(const UpdateInputs& in, int begin, int end);
  // Whether gather() fetches the unit, and whether refresh() and update() do.
  bool gathers() const { return mesh_.sharded() && !mesh_.keeps_weights(); }
  bool fetches() const { return mesh_.sharded() && mesh_.keeps_weights(); }
  bool has_copies() const;
  void make_copies(const ParamUnit& spec, Unit& unit);
  // What the ranks of the shards gather of the unit.
  Tensor gathered_shard(const Unit& unit) const;
  void cast_to_fp8();
  const Weights& open_gradients(int unit, const Tensor& whole, bool fresh);
  void fetch(Unit& unit);
  void reduce_shard(Unit& unit);
  void start_exchange(Unit& unit);
  void finish_exchange();
  void reduce_replicas(Unit& unit);
  void start_communication();
  // The unit's first tensor, for messages.
  const std::string& name(int unit) const { return registry_.unit(unit).tensors.front().name; }
  void require_at_rest(const char* what) const;

  const ParamRegistry& registry_;
  Stream& stream_;
  const Mesh& mesh_;
  const std::shared_ptr<const Optimizer> optimizer_;  // null: inference
  const ReduceType reduce_;
  const TransferEngine reduce_engine_;
  const double ema_;  // 0: no average
  // Memory that gathers read and write. It stands before the stream, whose destructor waits for
  // them.
  std::vector<std::shared_ptr<void>> registered_;
  std::optional<Stream> communication_;  // in a world of more than one
  std::optional<Fp8Weights> fp8_;        // where units hold matrices in fp8
  std::vector<Unit> units_;
  std::optional<Exchange> exchange_;
  std::unique_ptr<MatrixUpdate> matrices_;  // if the optimizer takes any
  int in_flight_ = 0;                       // groups of matrices that have been sent, not applied
  WaitTimes wait_times_;
  MicroBatch micro_batch_;
  std::deque<Event> reducing_;  // the ends of reductions that the compute stream has not waited for
};

// to [n] = host [n], rounded to the type of `to`. Unless that is f32, it takes at most 64 MiB of
// device memory meanwhile.
void upload(Stream& s, Tensor to, const float* host);

}  // namespace sbtrain
