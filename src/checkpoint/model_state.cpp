#include "checkpoint/model_state.h"

#include <fmt/ranges.h>

#include "core/error.h"
#include "parallel/param_shards.h"

namespace sbtrain {
namespace {

TensorKind kind_of(ParamState state) {
  switch (state) {
    case ParamState::kMaster:
      return TensorKind::kModel;
    case ParamState::kMoment1:
      return TensorKind::kAdamM;
    case ParamState::kMoment2:
      return TensorKind::kAdamV;
  }
  return TensorKind::kModel;
}

}  // namespace

std::vector<TensorShard> training_state(const ShardedParams& params) {
  std::vector<TensorShard> shards;
  for (const ParamRange& range : param_ranges(params, /*with_moments=*/true)) {
    shards.push_back({.kind = kind_of(range.state),
                      .name = range.name,
                      .shape = range.shape,
                      .begin = range.begin,
                      .end = range.end,
                      .data = range.data,
                      .row_stride = range.row_stride});
  }
  return shards;
}

void load_params(const CheckpointReader& checkpoint, ShardedParams& params, bool with_moments) {
  for (const ParamRange& range : param_ranges(params, with_moments)) {
    const TensorKind kind = kind_of(range.state);
    const auto refuse = [&](const std::string& why) {
      fail(ExitCode::kNoCheckpoint,
           "{}: {}/{} {}; the checkpoint belongs to another model, see `sbtrain config show`",
           checkpoint.folder().string(), tensor_kind_name(kind), range.name, why);
    };
    if (!checkpoint.has(kind, range.name)) refuse("is missing");
    if (checkpoint.shape(kind, range.name) != range.shape) {
      refuse(fmt::format("has shape [{}] where the model has [{}]",
                         fmt::join(checkpoint.shape(kind, range.name), ", "),
                         fmt::join(range.shape, ", ")));
    }
    checkpoint.read(kind, range.name, range.begin, range.end, range.data, range.row_stride);
  }
  params.refresh();
}

}  // namespace sbtrain
