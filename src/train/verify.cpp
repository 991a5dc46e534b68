#include "train/verify.h"

#include <fmt/ranges.h>

#include <map>

#include "core/error.h"
#include "model/transformer.h"
#include "optim/optimizer.h"
#include "train/run_state.h"

namespace sbtrain {
namespace {

using Shapes = std::map<std::string, std::vector<int64_t>>;

// The tensors that a run of this configuration saves, by kind and name.
std::map<std::string, Shapes> tensors_of(const Config& config) {
  std::map<std::string, Shapes> kinds;
  const Transformer model(config.model);
  const auto optimizer = make_optimizer(config.train.optimizer);
  for (const ParamUnit& unit : model.registry().units()) {
    for (const PlacedTensor& tensor : unit.tensors) {
      kinds[kModelKind][tensor.name] = tensor.spec.shape;
      if (config.train.ema > 0) kinds[kAverageKind][tensor.name] = tensor.spec.shape;
      for (const std::string& state : optimizer->states(tensor.spec)) {
        kinds[state][tensor.name] = tensor.spec.shape;
      }
    }
  }
  return kinds;
}

void verify_kind(const CheckpointReader& checkpoint, const std::string& kind, const Shapes& shapes,
                 std::vector<std::string>& problems) {
  const auto problem = [&](const std::string& name, const std::string& what) {
    problems.push_back(fmt::format("{}: {}/{} {}", checkpoint.folder().string(), kind, name, what));
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

void verify_tensors(const CheckpointReader& checkpoint, std::map<std::string, Shapes> tensors,
                    std::vector<std::string>& problems) {
  const std::vector<std::string> kinds = checkpoint.kinds();
  // `sbtrain import` writes weights alone.
  if (checkpoint.manifest().step == 0 && kinds == std::vector<std::string>{kModelKind}) {
    return verify_kind(checkpoint, kModelKind, tensors[kModelKind], problems);
  }
  for (const std::string& kind : kinds) tensors.try_emplace(kind);
  for (const auto& [kind, shapes] : tensors) verify_kind(checkpoint, kind, shapes, problems);
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
  verify_tensors(checkpoint, tensors_of(config), problems);
  verify_state(checkpoint, problems);
  return problems;
}

}  // namespace sbtrain
