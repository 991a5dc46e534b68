// Loss and accuracy on the held-out examples of a task, over labelled positions.
#pragma once

#include <cstdint>
#include <functional>

#include "core/number_text.h"
#include "data/batch.h"
#include "data/task.h"
#include "job/control.h"

namespace sbtrain {

struct TaskAccuracy {
  double loss_sum = 0;  // nats over all labels
  double hits = 0;      // labels that the model held most likely
  int64_t labels = 0;
  double loss() const { return without_nan_sign(loss_sum / static_cast<double>(labels)); }
  double accuracy() const { return hits / static_cast<double>(labels); }

  // Calls f with each sum (eval/rank_sums.h).
  void visit(const auto& f) {
    f(loss_sum);
    f(hits);
    f(labels);
  }
};

// The held-out examples of a task as batches of micro_batch sequences, the last ones padded.
int64_t held_out_batches(const Task& task, int64_t micro_batch);
// The i-th of them; beyond the last, a batch without labels.
PackedBatch held_out_batch(const Task& task, int64_t micro_batch, int64_t i);

// Scores all eval_examples of the task, with the batches dealt to the ranks: the same bits for any
// number of them.
TaskAccuracy task_accuracy(Control& ranks, const Task& task, int64_t micro_batch,
                           const std::function<BatchScore(const PackedBatch&)>& score);

}  // namespace sbtrain
