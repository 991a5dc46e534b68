// Reads, saves, compares and prints the results of a sweep's runs.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "cli/sweep_file.h"
#include "core/error.h"
#include "core/files.h"
#include "train/metrics.h"

namespace sbtrain {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr int kVersion = 1;

fs::path results_file(const SweepFile& sweep) {
  return fs::path(sweep.folder()) / "sweep.json";
}

json optional_json(const std::optional<double>& value) {
  return value ? json(*value) : json(nullptr);
}

std::optional<double> optional_number(const json& j) {
  return j.is_number() ? std::optional(j.get<double>()) : std::nullopt;
}

json to_json(const SweepRun& run, bool best) {
  json changes = json::object();
  for (const auto& [key, value] : run.grid) changes[key] = value;
  return {{"name", run.name},
          {"variant", run.variant},
          {"config", run.config},
          {"grid", changes},
          {"status", run.status},
          {"config_hash", run.config_hash},
          {"exit_code", run.exit_code},
          {"error", run.error},
          {"seconds", run.seconds},
          {"step", run.step},
          {"epochs", optional_json(run.epochs)},
          {"best_accuracy", optional_json(run.best_accuracy)},
          {"best_loss", optional_json(run.best_loss)},
          {"best", best}};
}

void from_json(const json& j, SweepRun& run) {
  j.at("status").get_to(run.status);
  j.at("config_hash").get_to(run.config_hash);
  j.at("exit_code").get_to(run.exit_code);
  j.at("error").get_to(run.error);
  j.at("seconds").get_to(run.seconds);
  j.at("step").get_to(run.step);
  run.epochs = optional_number(j.at("epochs"));
  run.best_accuracy = optional_number(j.at("best_accuracy"));
  run.best_loss = optional_number(j.at("best_loss"));
}

bool failed(const SweepRun& run) {
  return run.status == "failed";
}

// A run that has diverged, or failed otherwise, may have had a good result before: it does not
// count.
bool better(const SweepRun& a, const SweepRun& b) {
  if (failed(a)) return false;
  if (failed(b)) return a.best_accuracy || a.best_loss;
  if (a.best_accuracy != b.best_accuracy) return a.best_accuracy > b.best_accuracy;
  return a.best_loss && (!b.best_loss || *a.best_loss < *b.best_loss);
}

std::string number(const std::optional<double>& value, const char* format) {
  return value ? fmt::format(fmt::runtime(format), *value) : "-";
}

std::string state_of(const SweepRun& run) {
  return failed(run) ? fmt::format("failed ({})", run.exit_code) : run.status;
}

}  // namespace

std::vector<const SweepRun*> best_runs(const SweepFile& sweep, const std::vector<SweepRun>& runs) {
  std::vector<const SweepRun*> best;
  std::map<std::vector<std::string>, size_t> groups;  // to places in `best`
  for (const SweepRun& run : runs) {
    std::vector<std::string> group = {run.variant};
    for (const auto& [key, value] : run.grid) {
      if (std::ranges::count(sweep.best_over, key) == 0) group.push_back(value);
    }
    const auto [found, added] = groups.emplace(group, best.size());
    if (added) {
      best.push_back(&run);
    } else if (better(run, *best[found->second])) {
      best[found->second] = &run;
    }
  }
  return best;
}

void read_result(const fs::path& metrics, SweepRun& run) {
  std::ifstream file(metrics);
  run.step = 0;
  run.best_accuracy = run.best_loss = std::nullopt;
  for (std::string line; std::getline(file, line);) {
    const json record = json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!record.is_object()) continue;  // an incomplete line
    run.step = std::max(run.step, record.value("step", int64_t{0}));
    const auto value = [&](const char* key) {
      const auto found = record.find(key);
      return found == record.end() ? std::nullopt : optional_number(*found);
    };
    if (const auto accuracy = value(metric::kValidationAccuracy)) {
      run.best_accuracy = std::max(run.best_accuracy.value_or(*accuracy), *accuracy);
    }
    if (const auto loss = value(metric::kValidationLoss)) {
      run.best_loss = std::min(run.best_loss.value_or(*loss), *loss);
    }
  }
}

void write_results(const SweepFile& sweep, const std::vector<SweepRun>& runs) {
  const std::vector<const SweepRun*> best = best_runs(sweep, runs);
  json all = json::array();
  for (const SweepRun& run : runs) {
    all.push_back(to_json(run, !failed(run) && std::ranges::count(best, &run) > 0));
  }
  const json results = {{"version", kVersion},
                        {"name", sweep.name},
                        {"best_over", sweep.best_over},
                        {"runs", std::move(all)}};
  const std::string path = results_file(sweep);
  replace_file(path, results.dump(2) + "\n");
  replace_file(fs::path(path).replace_extension(".csv"), results_csv(sweep, runs));
}

void restore_results(const SweepFile& sweep, std::vector<SweepRun>& runs) {
  const fs::path path = results_file(sweep);
  if (!fs::exists(path)) return;
  const std::string text = read_input(path, ExitCode::kData);
  try {
    const json results = json::parse(text);
    if (results.at("version") != kVersion) {
      fail(ExitCode::kData, "{}: version {}; this sbtrain reads {}", path.string(),
           results.at("version").dump(), kVersion);
    }
    for (const json& saved : results.at("runs")) {
      const auto run =
          std::ranges::find(runs, saved.at("name").get<std::string>(), &SweepRun::name);
      if (run != runs.end()) from_json(saved, *run);
    }
  } catch (const json::exception& error) {
    fail(ExitCode::kData, "{}: not the results of a sweep ({}); move it away to start over",
         path.string(), error.what());
  }
}

std::string results_table(const SweepFile& sweep, const std::vector<const SweepRun*>& runs) {
  std::vector<std::vector<std::string>> rows = {{"variant"}};
  for (const auto& [key, values] : sweep.grid) rows[0].push_back(key);
  for (const char* title : {"accuracy", "loss", "epochs", "steps", "seconds", "status"}) {
    rows[0].emplace_back(title);
  }
  for (const SweepRun* run : runs) {
    std::vector<std::string>& row = rows.emplace_back();
    row.push_back(run->variant);
    for (const auto& [key, value] : run->grid) row.push_back(value);
    row.push_back(number(run->best_accuracy, "{:.4f}"));
    row.push_back(number(run->best_loss, "{:.4f}"));
    row.push_back(number(run->epochs, "{:.1f}"));
    row.push_back(fmt::format("{}", run->step));
    row.push_back(fmt::format("{:.0f}", run->seconds));
    row.push_back(state_of(*run));
  }
  std::vector<size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i) {
      text += i == 0 ? fmt::format("{:<{}}", row[i], widths[i])
                     : fmt::format("  {:>{}}", row[i], widths[i]);
    }
    text += "  " + row.back() + "\n";
  }
  return text;
}

std::string results_csv(const SweepFile& sweep, const std::vector<SweepRun>& runs) {
  // Quoted where a comma or a quote would end the field.
  const auto field = [](const std::string& text) {
    if (text.find_first_of(",\"\n") == std::string::npos) return text;
    std::string quoted = "\"";
    for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
    return quoted + "\"";
  };
  std::string text = "name,variant";
  for (const auto& [key, values] : sweep.grid) text += "," + field(key);
  text += ",status,exit_code,best_accuracy,best_loss,epochs,steps,seconds\n";
  for (const SweepRun& run : runs) {
    text += field(run.name) + "," + field(run.variant);
    for (const auto& [key, value] : run.grid) text += "," + field(value);
    const auto optional = [](const std::optional<double>& value) {
      return value ? fmt::format("{}", *value) : "";
    };
    text += fmt::format(",{},{},{},{},{},{},{:.1f}\n", run.status, run.exit_code,
                        optional(run.best_accuracy), optional(run.best_loss), optional(run.epochs),
                        run.step, run.seconds);
  }
  return text;
}

}  // namespace sbtrain
