// Loss and accuracy on the held-out examples of a task, over labelled positions.
#pragma once

#include <cstdint>
#include <functional>

#include "data/batch.h"
#include "data/task.h"

namespace sbtrain {

struct TaskAccuracy {
  double loss_sum = 0;  // nats over all labels
  double hits = 0;      // labels that the model held most likely
  int64_t labels = 0;
  double loss() const { return loss_sum / static_cast<double>(labels); }
  double accuracy() const { return hits / static_cast<double>(labels); }
};

// Scores all eval_examples of the task, in batches of micro_batch sequences.
TaskAccuracy task_accuracy(const Task& task, int64_t micro_batch,
                           const std::function<BatchScore(const PackedBatch&)>& score);

}  // namespace sbtrain
