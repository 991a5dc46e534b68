#include "eval/task_accuracy.h"

#include "eval/rank_sums.h"

namespace sbtrain {

int64_t held_out_batches(const Task& task, int64_t micro_batch) {
  return (task.config().eval_examples + micro_batch - 1) / micro_batch;
}

PackedBatch held_out_batch(const Task& task, int64_t micro_batch, int64_t i) {
  PackedBatch batch;
  clear(batch, micro_batch * task.length());
  for (int64_t example = i * micro_batch; example < (i + 1) * micro_batch; ++example) {
    if (example < task.config().eval_examples) {
      task.append_example(batch, Task::Split::kHeldOut, example);
    } else {
      append_padding(batch, task.length());  // batches have one size
    }
  }
  return batch;
}

TaskAccuracy task_accuracy(Control& ranks, const Task& task, int64_t micro_batch,
                           const std::function<BatchScore(const PackedBatch&)>& score) {
  const auto of_batch = [&](int64_t i) {
    const PackedBatch batch = held_out_batch(task, micro_batch, i);
    const BatchScore result = score(batch);
    return TaskAccuracy{
        .loss_sum = result.loss_sum, .hits = result.hits, .labels = batch.valid_targets};
  };
  return sum_over_ranks<TaskAccuracy>(ranks, held_out_batches(task, micro_batch), {}, of_batch);
}

}  // namespace sbtrain
