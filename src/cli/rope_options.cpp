#include "cli/rope_options.h"

#include "attention/registry.h"
#include "cli/options.h"
#include "config/schema.h"
#include "core/error.h"

namespace sbtrain {

void RopeOptions::add(Command command) {
  const char* group = "Rotary positions";
  Option given =
      command
          .add_choice("--rope-scaling", scaling,
                      "Stretch rotary positions: none, linear, ntk, dynamic_ntk, yarn or llama3; "
                      "default: as the run's configuration has it")
          .default_str("")
          .group(group);
  kind = given;
  command
      .add_option(
          "--rope-factor", factor,
          "Divisor of positions (linear; yarn and llama3: of low frequencies), alpha (ntk) or f "
          "(dynamic_ntk)")
      .check(in_range(1e-6, 1e6))
      .capture_default_str()
      .needs(given)
      .group(group);
  command
      .add_option("--rope-train-length", train_length,
                  "dynamic_ntk, yarn, llama3: the trained length; 0: the run's sequence length")
      .check(non_negative())
      .capture_default_str()
      .needs(given)
      .group(group);
}

std::string_view RopeOptions::name() const {
  return !kind.given() ? std::string_view() : name_of(scaling);
}

void RopeOptions::apply(Config& config) const {
  if (!kind.given()) return;
  bool found = false;
  for (AttentionConfig& attention : config.model.attention) {
    RotaryOptions* rotary = attention_registry().at(attention.type).rotary(attention.options);
    if (rotary == nullptr) continue;
    found = true;
    rotary->scaling = scaling;
    rotary->factor = factor;
    rotary->train_length = train_length > 0 ? train_length : config.train.sequence_length;
  }
  if (!found) fail(ExitCode::kUsage, "--rope-scaling: the model has no rotary positions");
  validate_config(config);
}

}  // namespace sbtrain
