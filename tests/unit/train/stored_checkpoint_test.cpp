// tests/data/checkpoint_adamw: a checkpoint that a program saved which knew AdamW alone. It is read
// and written again with every byte as it was, so runs of that program continue bit for bit.
#include <gtest/gtest.h>

#include "core/files.h"
#include "support/optimizer_runs.h"
#include "support/process.h"
#include "train/run_state.h"
#include "train/verify.h"

namespace sbtrain::test {
namespace {

TEST(StoredCheckpoint, KeepsEveryByte) {
  const std::filesystem::path run = std::string(SBTRAIN_SOURCE) + "/tests/data/checkpoint_adamw";
  const std::filesystem::path folder = run / "checkpoints/step-00000003";
  EXPECT_EQ(verify_checkpoint(folder), std::vector<std::string>{});
  const CheckpointReader stored(folder);
  const Config config = parse_config(stored.config_yaml(), "stored");
  EXPECT_EQ(config.train.optimizer, OptimizerConfig{});
  EXPECT_EQ(verify_contents(stored, config), std::vector<std::string>{});
  // A run of today, with the same configuration, is the same run.
  std::map<std::string, std::string> saved = stored.manifest().fingerprints;
  saved.merge(identity_fields(flatten(config)));
  check_identity(saved, identity_fields(flatten(config)), {}, folder.string());

  const TemporaryFolder again;
  run_optimizer(config, {.first = 3, .last = 3, .from = run.string(), .to = again.path()});
  const std::string file = "rank-00000-of-00001.safetensors";
  EXPECT_EQ(read_input(again.path() / "checkpoints/step-00000003" / file, ExitCode::kStorage),
            read_input(folder / file, ExitCode::kStorage));
}

}  // namespace
}  // namespace sbtrain::test
