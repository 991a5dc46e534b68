// Which tensors of a model a source of weights has, and how they are loaded.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "checkpoint/weight_source.h"
#include "model/params.h"
#include "parallel/sharded_params.h"

namespace sbtrain {

struct WeightMatch {
  std::vector<std::string> missing;     // the model has them, the source has not
  std::vector<std::string> unexpected;  // the other way round
  std::vector<std::string> misshapen;   // "NAME has shape [..] where the model has [..]"
};

WeightMatch match_weights(const WeightSource& source, const ParamRegistry& registry);

// Throws ExitCode::kConfig with all differences. With `accept_names` only shapes must agree.
// `source` is how messages call it.
void check_match(const WeightMatch& match, const std::string& source, bool accept_names = false);

// Fills this rank's ranges of the weights that the source has, with several threads, and leaves the
// others as they are. Weights that are not finite are refused (read_finite). refresh() is for all
// ranks together, and left to the caller.
void load_weights(const WeightSource& source, ShardedParams& params);

// Reads all weights of a checkpoint with several threads, and so verifies them.
void verify_weights(const CheckpointReader& checkpoint);

// The weights of a checkpoint, which are verified when they are read.
class CheckpointWeights : public WeightSource {
 public:
  explicit CheckpointWeights(CheckpointReader checkpoint) : checkpoint_(std::move(checkpoint)) {}
  const CheckpointReader& checkpoint() const { return checkpoint_; }

  std::string name() const override { return checkpoint_.folder().string(); }
  std::vector<std::string> names() const override { return checkpoint_.names(kModelKind); }
  bool has(std::string_view name) const override { return checkpoint_.has(kModelKind, name); }
  const std::vector<int64_t>& shape(std::string_view name) const override {
    return checkpoint_.shape(kModelKind, name);
  }
  void read(std::string_view name, int64_t begin, int64_t end, float* out) const override {
    checkpoint_.read(kModelKind, name, begin, end, out);
  }

 private:
  CheckpointReader checkpoint_;
};

}  // namespace sbtrain
