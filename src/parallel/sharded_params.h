// Sharded parameters: what every rank keeps of a model, and how a step sees the whole of a unit.
//
// A unit (embedding, block, head) is one flat array; rank r of W owns the r-th of W equal ranges
// of it: master weights, gradients and AdamW moments exist as that range only. A step asks for
// whole units through gather / get / release and gives gradients back through reduce. In a world
// of one the same calls run without communication. Use out of order throws.
#pragma once

#include <cstdint>
#include <vector>

#include "core/memory.h"
#include "core/stream.h"
#include "model/params.h"
#include "ops/optimizer.h"
#include "parallel/communicator.h"

namespace sbtrain {

class ShardedParams : public ParamAccess {
 public:
  // with_training: gradients and moments exist too. Contents are undefined until initialize() or
  // a checkpoint fills them.
  ShardedParams(const ParamRegistry& registry, Stream& s, Communicator& communicator,
                bool with_training);

  void gather(int unit) override;
  const Weights& get(int unit) override;
  void release(int unit) override;
  const Weights& gradients(int unit) override;
  void reduce(int unit) override;

  // The range of unit `u` that this rank owns: storage elements [begin, begin + size).
  struct Shard {
    int64_t begin = 0;
    int64_t size = 0;
    Tensor master, moment1, moment2, gradient;  // f32 [size]; the last three with training only
    std::vector<ops::DecayRange> decays;        // elements of the shard with weight decay
  };
  const ParamRegistry& registry() const { return registry_; }
  Stream& stream() const { return stream_; }
  const Shard& shard(int unit) const { return units_.at(unit).shard; }

  void initialize(uint64_t seed);  // weights by Philox, moments zero
  // To be called after the master weights changed: compute copies follow them.
  void refresh();
  void zero_gradients();
  // y_1 (f64) += the sum of the squares of this rank's gradients.
  void add_squared_gradient_norm(Tensor y_1);
  // One update of every shard and its compute copy. `adamw` carries stats and hyperparameters;
  // weight decay applies to the tensors whose spec says so.
  void update(ops::AdamW adamw);

 private:
  enum class State : uint8_t { kSharded, kGathered };
  struct Unit {
    Buffer master, moment1, moment2, gradient;
    Buffer compute;  // the whole unit in the compute type, where that is not the masters'
    Shard shard;
    Weights weights, gradients;
    State state = State::kSharded;
    int users = 0;  // gather() calls without their release()
  };
  const ParamRegistry& registry_;
  Stream& stream_;
  Communicator& communicator_;
  std::vector<Unit> units_;
};

}  // namespace sbtrain
