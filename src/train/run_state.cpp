#include "train/run_state.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "core/error.h"

namespace sbtrain {

std::string format_run_state(const RunState& state) {
  return nlohmann::json{{"step", state.step},
                        {"updates", state.updates},
                        {"tokens", state.tokens},
                        {"skipped_steps", state.guard.skipped},
                        {"skipped_in_a_row", state.guard.in_a_row},
                        {"stopped", state.stopped},
                        {"loader", state.loader}}
      .dump(2);
}

RunState parse_run_state(const std::string& text, const std::string& file) {
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    RunState state;
    json.at("step").get_to(state.step);
    json.at("updates").get_to(state.updates);
    json.at("tokens").get_to(state.tokens);
    json.at("skipped_steps").get_to(state.guard.skipped);
    json.at("skipped_in_a_row").get_to(state.guard.in_a_row);
    state.stopped = json.value("stopped", false);
    json.at("loader").get_to(state.loader);
    return state;
  } catch (const nlohmann::json::exception& e) {
    fail(ExitCode::kNoCheckpoint, "{}: not the state of a run: {}", file, e.what());
  }
}

std::map<std::string, std::string> identity_fields(
    const std::map<std::string, std::string>& config_fields) {
  static constexpr std::string_view kExact[] = {"seed", "train.sequence_length", "train.batch",
                                                "data.packing", "data.predict_across_documents"};
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
