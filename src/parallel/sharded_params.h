// Sharded parameters: what every rank keeps of a model, and how a step sees whole units.
//
// A unit (embedding, block, head) is one flat array; rank r of W owns the r-th of W equal ranges
// of it, and it keeps only that range of master weights, gradients and AdamW moments. A step asks
// for whole units through gather / get / release and gives gradients back through gradients /
// reduce. In a world of one the same calls run without communication. The calls for a unit come in
// this order, and any other throws ExitCode::kInternal:
//   gather, get as often as needed, release
//   gradients as often as needed, reduce        independently of these
//   whatever reads or changes all shards        while no unit is gathered or has open gradients
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/memory.h"
#include "core/stream.h"
#include "model/params.h"
#include "ops/optimizer.h"
#include "parallel/communicator.h"

namespace sbtrain {

class ShardedParams : public ParamAccess {
 public:
  // with_training: gradients and moments exist too. Without it there are only weights in the
  // compute type. Contents are undefined until initialize() or a checkpoint fills them.
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
    Tensor weights;                       // [size] f32 for training, else of the compute type
    Tensor moment1, moment2, gradient;    // f32 [size], for training
    std::vector<ops::DecayRange> decays;  // elements of the shard with weight decay
  };
  const ParamRegistry& registry() const { return registry_; }
  Stream& stream() const { return stream_; }
  const Shard& shard(int unit) const { return units_.at(unit).shard; }

  void initialize(uint64_t seed);  // weights by Philox, moments zero
  // To be called after the shards' weights have changed, so that get() shows the new ones.
  void refresh();
  void zero_gradients();
  // y_1 (f64) += the sum of the squares of this rank's gradients.
  void add_squared_gradient_norm(Tensor y_1);
  // Updates every shard and its compute copy. `adamw` carries stats and hyperparameters; weight
  // decay applies to the tensors whose spec says so.
  void update(ops::AdamW adamw);

 private:
  struct Unit {
    Buffer master, moment1, moment2, gradient;
    Buffer compute;  // the whole unit in the compute type, if that is not the masters'
    Shard shard;
    Weights weights, gradients;
    bool gathered = false;
    bool open = false;  // between gradients() and reduce()
  };
  Unit make_unit(int index, bool with_training);
  // The unit's first tensor, for messages.
  const std::string& name(int unit) const { return registry_.unit(unit).tensors.front().name; }
  void require_at_rest(const char* what) const;
  const ParamRegistry& registry_;
  Stream& stream_;
  Communicator& communicator_;
  std::vector<Unit> units_;
};

// to [n] = host [n], rounded to the type of `to`. Unless that is f32, it takes at most 64 MiB of
// device memory meanwhile.
void upload(Stream& s, Tensor to, const float* host);

}  // namespace sbtrain
