// Synthetic tasks, whose examples are generated during training. Each example is a document of its
// own, in which only the answers to queries are labelled. docs/tasks.md describes them.
//
//   mqar   Multi-query associative recall (Zoology, arXiv 2312.04927; the set-up of ReBased, arXiv
//          2402.10644): k1 v1 .. kK vK, keys and values distinct; then S = (L - 2K) / 2 slots of
//          two tokens. Each key stands once, at the first token of a slot of its own, and is
//          labelled with its value. Slots are drawn one after the other without replacement, p(g) ~
//          (g + 1)^(query_power - 1), g = 0 .. S - 1. All other tokens are 0.
//   mqrar  Multi-query repeated associative recall (Scaling Stick-Breaking Attention, arXiv
//          2410.17980, 5.1): k1 v1 .. kK vK with distinct keys; then S pairs of a key, uniform with
//          repetition and labelled with the key's current value, and its new value.
//
// Token 0 is the filler, keys are 1 .. V/2 - 1, values V/2 .. V - 1. An example depends only on
// (task, V, L, seed, split, index).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/batch.h"
#include "data/data_config.h"
#include "data/packing.h"

namespace sbtrain {

class Task {
 public:
  enum class Split : uint8_t { kTraining, kHeldOut };  // disjoint streams of examples

  // Throws ExitCode::kConfig when the pairs do not fit the vocabulary or the length.
  Task(const TaskConfig& config, int64_t vocab, int64_t length, uint64_t seed);

  const TaskConfig& config() const { return config_; }
  int64_t length() const { return length_; }
  uint64_t seed() const { return seed_; }

  // Appends example `index` as a segment of L tokens.
  void append_example(PackedBatch& batch, Split split, int64_t index) const;

  // Names everything that the examples depend on except the seed.
  std::string fingerprint() const;

 private:
  TaskConfig config_;
  int64_t vocab_;
  int64_t length_;
  uint64_t seed_;
  std::vector<double> slot_weights_;  // mqar: (g + 1)^(query_power - 1)
};

// The training examples of a task. Each epoch sees every example once, in an order of its own.
std::unique_ptr<Packer> make_task_packer(const Task& task, SourceCursor cursor);

}  // namespace sbtrain
