#include "train/verify.h"

#include <fmt/ranges.h>

#include <map>

#include "core/error.h"
#include "model/transformer.h"
#include "train/run_state.h"

namespace sbtrain {
namespace {

using Shapes = std::map<std::string, std::vector<int64_t>>;

Shapes shapes_of(const ModelConfig& config) {
  Shapes shapes;
  const Transformer model(config);
  for (const ParamUnit& unit : model.registry().units()) {
    for (const PlacedTensor& tensor : unit.tensors) shapes[tensor.name] = tensor.spec.shape;
  }
  return shapes;
}

void verify_tensors(const CheckpointReader& checkpoint, const Shapes& shapes,
                    std::vector<std::string>& problems) {
  const std::string folder = checkpoint.folder().string();
  // `sbtrain import` writes weights alone.
  const bool weights_alone = checkpoint.manifest().step == 0 &&
                             checkpoint.names(TensorKind::kAdamM).empty() &&
                             checkpoint.names(TensorKind::kAdamV).empty();
  for (const TensorKind kind : {TensorKind::kModel, TensorKind::kAdamM, TensorKind::kAdamV}) {
    if (weights_alone && kind != TensorKind::kModel) continue;
    const auto problem = [&](const std::string& name, const std::string& what) {
      problems.push_back(fmt::format("{}: {}/{} {}", folder, tensor_kind_name(kind), name, what));
    };
    for (const auto& [name, shape] : shapes) {
      if (!checkpoint.has(kind, name)) {
        problem(name, "is missing; the model of config.yaml has it");
      } else if (checkpoint.shape(kind, name) != shape) {
        problem(name,
                fmt::format("has shape [{}], [{}] in the model of config.yaml",
                            fmt::join(checkpoint.shape(kind, name), ", "), fmt::join(shape, ", ")));
      }
    }
    for (const std::string& name : checkpoint.names(kind)) {
      if (!shapes.contains(name)) problem(name, "is no tensor of the model of config.yaml");
    }
  }
}

void verify_state(const CheckpointReader& checkpoint, std::vector<std::string>& problems) {
  const std::string file = (checkpoint.folder() / "state.json").string();
  try {
    const RunState state = parse_run_state(checkpoint.state_json(), file);
    const Manifest& manifest = checkpoint.manifest();
    if (state.step != manifest.step || state.tokens != manifest.tokens) {
      problems.push_back(
          fmt::format("{}: step {} and {} tokens, but the manifest has step {} and {}", file,
                      state.step, state.tokens, manifest.step, manifest.tokens));
    }
  } catch (const Error& error) {
    const std::string text = error.what();
    problems.push_back(text.starts_with(file) ? text : fmt::format("{}: {}", file, text));
  }
}

}  // namespace

std::vector<std::string> verify_contents(const CheckpointReader& checkpoint, const Config& config) {
  std::vector<std::string> problems;
  verify_tensors(checkpoint, shapes_of(config.model), problems);
  verify_state(checkpoint, problems);
  return problems;
}

}  // namespace sbtrain
