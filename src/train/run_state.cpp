#include "train/run_state.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <type_traits>

#include "core/error.h"
#include "data/loader.h"

namespace sbtrain {

std::string format_run_state(const RunState& state) {
  return nlohmann::json{{"step", state.step},
                        {"updates", state.updates},
                        {"tokens", state.tokens},
                        {"lr", state.lr},
                        {"skipped_steps", state.guard.skipped},
                        {"skipped_in_a_row", state.guard.in_a_row},
                        {"spike_steps", state.guard.spikes},
                        {"last_is_spike", state.guard.spike},
                        {"loss_count", state.running.count},
                        {"loss_mean", state.running.mean},
                        {"loss_variance", state.running.variance},
                        {"validation_due", state.validation_due},
                        {"stopped", state.stopped},
                        {"loader", state.loader}}
      .dump(2);
}

namespace {

// Reads the fields of a state. Later fields may be missing, since older states lack them.
class StateReader {
 public:
  StateReader(const std::string& text, const std::string& file)
      : json_(nlohmann::json::parse(text)), file_(file) {}

  template <typename T>
  void required(const char* key, T& value) const {
    const nlohmann::json& field = json_.at(key);
    // Without this check, a number that does not fit would be converted to any value.
    if (std::is_same_v<T, int64_t> && !field.is_number_integer()) {
      fail(ExitCode::kNoCheckpoint, "{}: {} is {}, not a whole number", file_, key, field.dump());
    }
    field.get_to(value);
  }
  template <typename T>
  void later(const char* key, T& value) const {
    if (json_.contains(key)) required(key, value);
  }
  // Requires lowest <= value <= highest, which NaN does not meet.
  template <typename T>
  void within(const char* key, T value, T lowest, T highest) const {
    if (value >= lowest && value <= highest) return;
    fail(ExitCode::kNoCheckpoint, "{}: {} is {}, but lies between {} and {} in a run's state",
         file_, key, value, lowest, highest);
  }

 private:
  nlohmann::json json_;
  const std::string& file_;
};

void read_counters(const StateReader& in, RunState& state) {
  in.required("step", state.step);
  in.required("updates", state.updates);
  in.required("tokens", state.tokens);
  in.required("skipped_steps", state.guard.skipped);
  in.required("skipped_in_a_row", state.guard.in_a_row);
  in.later("spike_steps", state.guard.spikes);
  constexpr int64_t kMost = int64_t{1} << 53;  // exact as a double, as which the device counts
  in.within<int64_t>("step", state.step, 0, kMost);
  in.within<int64_t>("updates", state.updates, 0, state.step);
  in.within<int64_t>("tokens", state.tokens, 0, INT64_MAX);
  in.within<int64_t>("skipped_steps", state.guard.skipped, 0, state.step);
  in.within<int64_t>("spike_steps", state.guard.spikes, 0, state.step);
  in.within<int64_t>("skipped_in_a_row", state.guard.in_a_row, 0, state.step - state.updates);
}

void read_losses(const StateReader& in, RunState& state) {
  constexpr double kMost = std::numeric_limits<double>::max();
  in.later("lr", state.lr);
  in.later("loss_count", state.running.count);
  in.later("loss_mean", state.running.mean);
  in.later("loss_variance", state.running.variance);
  in.within("lr", state.lr, 0.0, kMost);
  in.within<int64_t>("loss_count", state.running.count, 0, state.updates);
  in.within("loss_mean", state.running.mean, -kMost, kMost);
  in.within("loss_variance", state.running.variance, 0.0, kMost);
}

// Checkpoints are saved between steps, by a loader that has counted them all.
void check_loader(const RunState& state, const std::string& file) {
  if (state.loader.empty()) return;  // saved before the first step
  LoaderState loader;
  try {
    loader = LoaderState::from_json(state.loader);
  } catch (const Error& error) {
    fail(ExitCode::kNoCheckpoint, "{}: {}", file, error.what());
  }
  if (loader.step == state.step && loader.micro == 0) return;
  fail(ExitCode::kNoCheckpoint,
       "{}: its data state is at step {} and micro-batch {}, not at step {}", file, loader.step,
       loader.micro, state.step);
}

}  // namespace

RunState parse_run_state(const std::string& text, const std::string& file) {
  try {
    const StateReader in(text, file);
    RunState state;
    read_counters(in, state);
    read_losses(in, state);
    in.later("last_is_spike", state.guard.spike);
    in.later("validation_due", state.validation_due);
    in.later("stopped", state.stopped);
    in.required("loader", state.loader);
    check_loader(state, file);
    return state;
  } catch (const nlohmann::json::exception& e) {
    fail(ExitCode::kNoCheckpoint, "{}: not the state of a run: {}", file, e.what());
  }
}

std::map<std::string, std::string> identity_fields(
    const std::map<std::string, std::string>& config_fields) {
  static constexpr std::string_view kExact[] = {
      "seed",         "train.sequence_length",         "train.batch",
      "data.packing", "data.predict_across_documents", "train.optimizer"};
  std::map<std::string, std::string> fields;
  for (const auto& [key, value] : config_fields) {
    const bool model = key.rfind("model.", 0) == 0;
    const bool task =
        key.rfind("data.task.", 0) == 0 && value != "none" && key != "data.task.eval_examples";
    if (model || task || std::find(std::begin(kExact), std::end(kExact), key) != std::end(kExact)) {
      fields[key] = value;
    }
  }
  return fields;
}

void check_identity(const std::map<std::string, std::string>& saved,
                    const std::map<std::string, std::string>& now,
                    const std::vector<std::string>& allowed, const std::string& folder) {
  std::map<std::string, std::string> keys = saved;
  keys.insert(now.begin(), now.end());
  const auto value = [](const std::map<std::string, std::string>& fields, const std::string& key) {
    const auto it = fields.find(key);
    return it == fields.end() ? std::string("(not set)") : it->second;
  };
  std::string differences;
  for (const auto& [key, unused] : keys) {
    if (value(saved, key) == value(now, key)) continue;
    if (std::find(allowed.begin(), allowed.end(), key) != allowed.end()) continue;
    differences += fmt::format("\n  {}: {} in the checkpoint, {} now", key, value(saved, key),
                               value(now, key));
  }
  if (differences.empty()) return;
  fail(ExitCode::kConfig,
       "{} belongs to a run with another configuration:{}\n"
       "Use the saved values, name another --out for a new run, or allow single keys by "
       "--checkpoint.allow_changes='[key, ...]'",
       folder, differences);
}

}  // namespace sbtrain
