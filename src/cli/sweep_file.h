// A sweep: training runs that differ in a few keys of the configuration, and their results.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace sbtrain {

// The file of a sweep, e.g.
//
//   name: mqrar
//   variants:                    # the configurations to compare, each with changes of its own
//     - {name: stickbreaking, config: ../mqrar_sb.yaml}
//     - {name: softmax_rope, config: ../mqrar_rope.yaml, set: {train.clip: 0.5}}
//   set: {seed: 2}               # changes of all runs
//   grid:                        # every combination of these values
//     data.task.pairs: [32, 64]
//     train.lr: [1e-4, 1e-3]
//   best_over: [train.lr]        # the summary keeps the best run over these keys
using Changes = std::vector<std::pair<std::string, std::string>>;  // key, value as text

struct SweepVariant {
  std::string name;
  std::string config;  // path
  Changes set;
};

struct SweepFile {
  std::string name;
  std::string out;  // folder of the runs; empty: runs/<name>
  std::vector<SweepVariant> variants;
  Changes set;
  std::vector<std::pair<std::string, std::vector<std::string>>> grid;
  std::vector<std::string> best_over;  // keys of the grid
  std::string folder() const { return out.empty() ? "runs/" + name : out; }
};

// Throws ExitCode::kConfig with every problem of the file: unknown keys of it or of the
// configuration, values that are not lists, variants of the same name.
SweepFile read_sweep(const std::string& path);

// One run of a sweep and its result so far.
struct SweepRun {
  std::string name;     // folder in that of the sweep: "<variant>/pairs=32,lr=1e-4"
  std::string variant;  // its name
  std::string config;   // path
  Changes set;          // those of the variant and of all runs
  Changes grid;         // of this run

  std::string status = "waiting";  // waiting | running | interrupted | failed | done
  std::string config_hash;         // of the whole configuration when it ended
  int64_t exit_code = 0;
  std::string error;  // why the run could not be started
  double seconds = 0;
  int64_t step = 0;
  std::optional<double> epochs, best_accuracy, best_loss;
};

// Every combination of the sweep's variants and grid values, the last key changing fastest.
std::vector<SweepRun> expand(const SweepFile& sweep);

// Runs that differ only in the keys of best_over form a group. Returns the best run of each group,
// in the order of `runs`: the one with the highest accuracy, or with the lowest loss if there is no
// accuracy. What a run had reached that has failed does not count. A group without any result keeps
// its first run.
std::vector<const SweepRun*> best_runs(const SweepFile& sweep, const std::vector<SweepRun>& runs);

// Takes step, best accuracy and best loss from a run's metrics.jsonl, if there is one.
void read_result(const std::filesystem::path& metrics, SweepRun& run);

// Writes <folder>/sweep.json: all runs with their results, and which are the best; none that has
// failed is. The file is replaced atomically.
void write_results(const SweepFile& sweep, const std::vector<SweepRun>& runs);
// Fills in the results that an earlier sweep has saved of these runs. A file that cannot be read is
// an error (ExitCode::kData), so that it is not overwritten.
void restore_results(const SweepFile& sweep, std::vector<SweepRun>& runs);

// The results as a table for people, and as one for spreadsheets.
std::string results_table(const SweepFile& sweep, const std::vector<const SweepRun*>& runs);
std::string results_csv(const SweepFile& sweep, const std::vector<SweepRun>& runs);

}  // namespace sbtrain
