// What a run reads: documents in files, or a synthetic task.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/enum_names.h"

namespace sbtrain {

struct SourceConfig {
  std::string path;     // HDF5 document store
  double weight = 1.0;  // share of the mixture's tokens
  bool operator==(const SourceConfig&) const = default;
};

// Multi-query associative recall, or its repeated form; kNone: data comes from files.
enum class TaskKind : uint8_t { kNone, kMqar, kMqrar };
template <>
inline constexpr auto kNames<TaskKind> = enum_names<TaskKind>({{TaskKind::kNone, "none"},
                                                               {TaskKind::kMqar, "mqar"},
                                                               {TaskKind::kMqrar, "mqrar"}});

// A synthetic task, generated during training, in place of data from files (data/task.h).
struct TaskConfig {
  TaskKind type = TaskKind::kNone;
  int64_t pairs = 32;            // K: keys in one example
  double query_power = 0.01;     // mqar: a of p(slot g) ~ (g + 1)^(a - 1)
  int64_t examples = 100000;     // in one epoch
  int64_t eval_examples = 3000;  // held out
  bool active() const { return type != TaskKind::kNone; }
  // The number of slots, of two tokens each, after the 2 K tokens that state the pairs.
  int64_t slots(int64_t length) const { return (length - 2 * pairs) / 2; }
  // The tokens of an example that are labelled.
  int64_t targets(int64_t length) const { return type == TaskKind::kMqar ? pairs : slots(length); }
  bool operator==(const TaskConfig&) const = default;
};

// How documents fill rows: one after the other, or with the fewest cuts.
enum class Packing : uint8_t { kConcat, kBestFit };
template <>
inline constexpr auto kNames<Packing> = enum_names<Packing>({{Packing::kConcat, "concat"},
                                                             {Packing::kBestFit, "best_fit"}});

struct DataConfig {
  std::vector<SourceConfig> sources;
  std::vector<std::string> validation;  // HDF5 document stores
  std::string tokenizer;                // of the data, for samples and bits per byte
  Packing packing = Packing::kConcat;
  bool predict_across_documents = false;
  int64_t prefetch = 4;  // micro-batches prepared ahead
  TaskConfig task{};
  bool operator==(const DataConfig&) const = default;
};

}  // namespace sbtrain
