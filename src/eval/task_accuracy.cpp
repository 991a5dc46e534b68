#include "eval/task_accuracy.h"

namespace sbtrain {

TaskAccuracy task_accuracy(const Task& task, int64_t micro_batch,
                           const std::function<BatchScore(const PackedBatch&)>& score) {
  TaskAccuracy result;
  const int64_t examples = task.config().eval_examples;
  for (int64_t first = 0; first < examples; first += micro_batch) {
    PackedBatch batch;
    clear(batch, micro_batch * task.length());
    for (int64_t i = first; i < first + micro_batch; ++i) {
      if (i < examples) {
        task.append_example(batch, Task::Split::kHeldOut, i);
      } else {
        append_padding(batch, task.length());  // batches have one size
      }
    }
    const BatchScore of_batch = score(batch);
    result.loss_sum += of_batch.loss_sum;
    result.hits += of_batch.hits;
    result.labels += batch.valid_targets;
  }
  return result;
}

}  // namespace sbtrain
