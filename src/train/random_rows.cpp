#include "train/random_rows.h"

#include <vector>

#include "core/philox.h"

namespace sbtrain {

PackedBatch random_rows(const TrainConfig& train, const ModelConfig& model, int64_t targets,
                        int64_t index) {
  const int64_t L = train.sequence_length;
  const int64_t T = L * train.micro_batch;
  const Philox random(1, RandomPurpose::kTest, "bench", static_cast<uint64_t>(index));
  std::vector<int32_t> drawn;
  for (int64_t t = 0; t <= T; ++t) {
    drawn.push_back(static_cast<int32_t>(random.uniform(t) * static_cast<double>(model.vocab)));
  }
  PackedBatch batch;
  batch.tokens.assign(drawn.begin(), drawn.end() - 1);
  batch.targets.assign(drawn.begin() + 1, drawn.end());
  for (int64_t t = 0; t < T; ++t) {
    const int64_t at = t % L;
    batch.positions.push_back(static_cast<int32_t>(at));
    const bool has_target = (at + 1) * targets / L > at * targets / L;
    if (!has_target) batch.targets[static_cast<size_t>(t)] = -1;
  }
  for (int64_t t = 0; t <= T; t += L) batch.cu_seqlens.push_back(static_cast<int32_t>(t));
  batch.valid_targets = targets * train.micro_batch;
  return batch;
}

}  // namespace sbtrain
