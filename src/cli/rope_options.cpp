#include "cli/rope_options.h"

#include <CLI/CLI.hpp>

#include "cli/range.h"
#include "config/schema.h"
#include "core/error.h"

namespace sbtrain {

void RopeOptions::add(CLI::App& command) {
  const char* group = "Rotary positions";
  CLI::Option* kind =
      command
          .add_option("--rope-scaling", scaling,
                      "Stretch rotary positions: none, linear, ntk or dynamic_ntk; default: as the "
                      "run's configuration has it")
          ->check(CLI::IsMember({"none", "linear", "ntk", "dynamic_ntk"}))
          ->group(group);
  command
      .add_option("--rope-factor", factor,
                  "Divisor of positions (linear), alpha (ntk) or f (dynamic_ntk)")
      ->check(in_range(1e-6, 1e6))
      ->capture_default_str()
      ->needs(kind)
      ->group(group);
  command
      .add_option("--rope-train-length", train_length,
                  "dynamic_ntk: the trained length; 0: the run's sequence length")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str()
      ->needs(kind)
      ->group(group);
}

void RopeOptions::apply(Config& config) const {
  if (scaling.empty()) return;
  bool rotary = false;
  for (AttentionConfig& attention : config.model.attention) {
    const bool rotates =
        (attention.type == "softmax" && attention.position == "rope") || attention.type == "coca";
    if (!rotates) continue;
    rotary = true;
    attention.rope_scaling = scaling;
    attention.rope_factor = factor;
    attention.rope_train_length = train_length > 0 ? train_length : config.train.sequence_length;
  }
  if (!rotary) fail(ExitCode::kUsage, "--rope-scaling: the model has no rotary positions");
  validate_config(config);
}

}  // namespace sbtrain
