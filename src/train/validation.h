// The loss of a run on held-out data while it trains.
#pragma once

#include <optional>

#include "data/task.h"
#include "eval/perplexity.h"
#include "job/control.h"
#include "parallel/mesh.h"
#include "train/metrics.h"
#include "train/run_config.h"
#include "train/signals.h"
#include "train/step.h"

namespace sbtrain {

// The text of data.validation, or the held-out examples of data.task, dealt to the ranks.
class Validation {
 public:
  // Opens and checks everything, the text that the run trains on included. Throws as HeldOut and
  // training_tokenizer do.
  Validation(const Config& config, const Mesh& mesh);

  bool empty() const { return !task_ && text_.empty(); }

  // Over the data of all ranks, each of which evaluates as many batches as the others, and calls
  // this. None if a rank was asked to stop meanwhile.
  std::optional<ValidationMetrics> measure(TrainStep& step, Control& control,
                                           const StopSignals& signals) const;

 private:
  int64_t batches() const;
  PackedBatch batch(int64_t i) const;

  const int64_t micro_batch_;
  const int rank_, world_;
  const HeldOut text_;
  std::optional<Task> task_;
};

}  // namespace sbtrain
