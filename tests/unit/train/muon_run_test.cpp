// Runs with Muon, and with an average of the weights, in every world and mode.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "config/schema.h"
#include "optim/optimizer.h"
#include "parallel/matrix_update.h"
#include "support/optimizer_runs.h"
#include "support/process.h"
#include "train/plan.h"
#include "train/scale.h"

namespace sbtrain::test {
namespace {

const Config& muon() {
  static const Config config = optimizer_config("optimizer: muon");
  return config;
}

class MuonRun : public testing::TestWithParam<OptimizerRun> {
 protected:
  static OptimizerRun run(int first, int last) { return GetParam().steps(first, last); }
};

// With the same gradients, which ranks own the matrices, and how these travel, changes no bit, of
// averages neither: they take the weights when the last matrix of a unit is there.
TEST_P(MuonRun, TheSameGradientsGiveTheSameBits) {
  for (const char* option :
       {"qkv_matrices: whole", "qkv_matrices: group", "qkv_matrices: head", "ema: 0.75"}) {
    Config config = optimizer_config(fmt::format("optimizer: muon, {}", option));
    config.train.clip = 0;  // the norm is summed up by shards
    OptimizerRun one{.last = 4, .one_sequence = true};
    OptimizerRun many = run(0, 4);
    many.one_sequence = true;
    EXPECT_EQ(run_optimizer(config, many).tensors, run_optimizer(config, one).tensors) << option;
  }
}

TEST_P(MuonRun, TrainsLikeOneRank) {
  const OptimizerResult one = run_optimizer(muon(), {.last = 20});
  const OptimizerResult many = run_optimizer(muon(), run(0, 20));
  EXPECT_LT(one.losses.back(), one.losses.front());
  for (size_t i = 0; i < one.losses.size(); ++i) {
    EXPECT_NEAR(many.losses[i], one.losses[i], 1e-4 * one.losses[i]) << i;
  }
}

TEST_P(MuonRun, ASkippedStepLeavesTheMomentum) {
  OptimizerRun skipped = run(0, 2);
  skipped.bad_step = 1;
  EXPECT_EQ(run_optimizer(muon(), skipped).tensors, run_optimizer(muon(), run(0, 1)).tensors);
}

TEST_P(MuonRun, ThePlannedPoolGivesTheSameBits) {
  OptimizerRun planned = run(0, 3);
  planned.planned = true;
  EXPECT_EQ(run_optimizer(muon(), planned).tensors, run_optimizer(muon(), run(0, 3)).tensors);
}

TEST_P(MuonRun, ResumesBitForBit) {
  const OptimizerResult straight = run_optimizer(muon(), run(0, 6));
  const OptimizerResult resumed = run_resumed(muon(), GetParam(), 3, 6);
  EXPECT_EQ(resumed.tensors, straight.tensors);
  EXPECT_EQ(resumed.losses,
            std::vector<double>(straight.losses.begin() + 3, straight.losses.end()));
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, MuonRun,
    testing::Values(OptimizerRun{}, OptimizerRun{.world = 2}, OptimizerRun{.world = 8},
                    OptimizerRun{.sharding = Sharding::kGrad, .world = 4},
                    OptimizerRun{.sharding = Sharding::kNone, .world = 2},
                    OptimizerRun{.sharding = Sharding::kNone, .world = 8},
                    OptimizerRun{.sharding = Sharding::kHybrid, .world = 4, .node_size = 2},
                    OptimizerRun{.sharding = Sharding::kHybrid, .world = 8, .node_size = 2}),
    [](const auto& info) {
      return fmt::format("{}{}", name_of(info.param.sharding), info.param.world);
    });

// Every element of a matrix is in one piece of one rank, pieces do not overlap on their way, and
// the owners have about the same work.
TEST(MatrixGroups, DealOutEveryElementEvenly) {
  ModelConfig model = muon().model;
  model.layers = 16;
  const auto optimizer = make_optimizer(muon().train.optimizer);
  for (const auto& [shards, replicas] : {std::pair{1, 1}, {8, 1}, {4, 2}, {1, 3}, {16, 4}}) {
    const Transformer transformer(model, Recompute::kNone, shards);
    const ParamRegistry& registry = transformer.registry();
    std::map<std::string, int64_t> held;
    std::vector<double> work;
    std::map<int, double> most;     // of a rank, for each group
    std::map<int, double> planned;  // the same, as the groups say
    std::set<std::string> owned;
    for (int replica = 0; replica < replicas; ++replica) {
      for (int shard = 0; shard < shards; ++shard) {
        const auto groups = plan_matrices(registry, *optimizer, {shards, shard, replicas, replica});
        EXPECT_EQ(groups.front().begin, 0);
        EXPECT_EQ(groups.back().end, static_cast<int>(registry.units().size()));
        double mine = 0;
        for (const MatrixGroup& group : groups) {
          std::set<std::pair<int, int64_t>> starts;
          std::map<int, std::set<std::pair<int64_t, int64_t>>> gathered;  // by replica
          for (const MatrixPiece& piece : group.pieces) {
            EXPECT_LE(piece.offset + piece.size, group.part);
            EXPECT_TRUE(starts.insert({piece.replica * shards + piece.owner, piece.offset}).second);
            EXPECT_LE(piece.gathered + piece.size, group.gathered);
            gathered[piece.replica].emplace(piece.gathered, piece.size);
            if (replica == 0) held[piece.tensor->name] += piece.size;
          }
          for (const auto& [of, places] : gathered) {
            int64_t end = 0;
            for (const auto& [begin, size] : places) {
              EXPECT_GE(begin, end) << "replica " << of;
              end = begin + size;
            }
          }
          double work_of_group = 0;
          for (const OwnedMatrix& matrix : group.owned) {
            EXPECT_TRUE(owned.insert(matrix.tensor->name).second) << matrix.tensor->name;
            work_of_group += optimizer->transform_flops(matrix.tensor->spec);
          }
          mine += work_of_group;
          most[group.begin] = std::max(most[group.begin], work_of_group);
          planned[group.begin] = group.flops;
        }
        work.push_back(mine);
      }
    }
    EXPECT_EQ(owned.size(), 16U * 7);
    for (const auto& [begin, flops] : most) EXPECT_DOUBLE_EQ(planned[begin], flops) << begin;
    double total = 0;
    for (const double one : work) total += one;
    const double mean = total / static_cast<double>(work.size());
    if (work.size() <= 16) {
      EXPECT_LE(*std::ranges::max_element(work), 1.2 * mean) << shards;
    }
    for (const ParamUnit& unit : registry.units()) {
      for (const PlacedTensor& tensor : unit.tensors) {
        if (!optimizer->takes_matrix(tensor.spec)) continue;
        EXPECT_EQ(held[tensor.name], tensor.stored) << tensor.name;
      }
    }
  }
}

// What replicas gather has little padding, and comes in several groups, so that one travels beside
// the work on others.
TEST(MatrixGroups, GatherLittlePadding) {
  const Config config = load_config(SBTRAIN_SOURCE "/configs/1b_sb.yaml");
  const auto optimizer = make_optimizer(muon().train.optimizer);
  for (const auto& [shards, replicas] :
       {std::pair{1, 2}, {1, 8}, {1, 64}, {2, 2}, {8, 2}, {8, 8}}) {
    const Transformer transformer(config.model, Recompute::kNone, shards);
    const ParamRegistry& registry = transformer.registry();
    int64_t elements = 0;
    for (const ParamUnit& unit : registry.units()) {
      for (const PlacedTensor& tensor : unit.tensors) {
        if (optimizer->takes_matrix(tensor.spec)) elements += tensor.stored;
      }
    }
    const auto groups =
        plan_matrices(registry, *optimizer, {.shards = shards, .replicas = replicas});
    EXPECT_GE(groups.size(), shards == 1 ? 4U : 2U) << shards << " x " << replicas;
    int64_t travels = 0;  // to all ranks of a replica
    for (const MatrixGroup& group : groups) travels += shards * replicas * group.gathered;
    EXPECT_LE(static_cast<double>(travels), 1.15 * static_cast<double>(elements))
        << shards << " x " << replicas;
  }
}

TEST(MuonPlan, KeepsHalfTheStateOfMatrices) {
  const auto elements = [](const OptimizerResult& result, std::string_view kind) {
    size_t count = 0;
    for (const auto& [name, values] : result.tensors) {
      if (name.starts_with(kind)) count += values.size();
    }
    return count;
  };
  const OptimizerResult adamw = run_optimizer(optimizer_config(""), {});
  const OptimizerResult result = run_optimizer(muon(), {});
  const size_t matrices = elements(result, "muon_m/");
  EXPECT_GT(matrices, elements(result, "model/") / 2);
  EXPECT_EQ(elements(adamw, "adam_"), 2 * elements(result, "model/"));
  EXPECT_EQ(elements(result, "adam_"), elements(adamw, "adam_") - 2 * matrices);
  EXPECT_NE(describe_run(muon(), Backend::kCpu, {}).find("muon_m of"), std::string::npos);
}

// What travels has room for the groups that are under way at once, and no more: two of a model
// whose matrices are two groups, never more than three.
TEST(MuonPlan, HasRoomForTheGroupsUnderWay) {
  const auto optimizer_bytes = [](const Config& config, int world) {
    const RankPlan plan = plan_rank(config, Backend::kCuda, {.world = world, .gpus_per_node = 2});
    return plan.memory.persistent[static_cast<size_t>(MemoryClass::kOptimizer)];
  };
  for (const auto& [layers, groups] : {std::pair<int, size_t>{2, 2}, {4, 4}, {8, 4}}) {
    Config config = muon();
    config.model.layers = layers;
    config.model.width = 32;  // heads of 8 channels, which the plan for a GPU takes
    config.train.sharding = Sharding::kNone;
    const Transformer transformer(config.model, Recompute::kNone, 1);
    const auto optimizer = make_optimizer(config.train.optimizer);
    const auto planned = plan_matrices(transformer.registry(), *optimizer, {.replicas = 2});
    ASSERT_EQ(planned.size(), groups);
    int64_t part = 0;
    for (const MatrixGroup& group : planned) part = std::max(part, group.part);
    // Of a group, what leaves this rank and what comes back from both, in bf16.
    const auto room = static_cast<size_t>((1 + 2) * part * 2) * std::min<size_t>(groups, 3);
    EXPECT_EQ(optimizer_bytes(config, 2) - optimizer_bytes(config, 1), room) << layers;
  }
}

// Muon takes the matrices of layers; tables, norms, biases, gates, convolutions and FIRE are
// AdamW's, whatever the model is made of.
TEST(MuonMatrices, AreTheProjectionsOfEveryModule) {
  for (const char* model :
       {"attention: {type: stickbreaking, forget_gate: true, head_norm: true, remainder: bias,"
        "            qkv_bias: true}",
        "attention: {type: softmax, qk_norm: true, qkv_bias: true, output_bias: true}, norm: "
        "layernorm",
        "attention: {type: softmax, position: fire}",
        "attention: {type: softmax, position: fire, shared: true}, tied: true",
        "attention: {type: softmax, position: none}, position: learned, max_positions: 64, mlp: "
        "gelu",
        "attention: {type: coca}", "attention: {type: based}", "attention: {type: rebased}",
        "attention: [{type: short_conv}, {type: stickbreaking}]"}) {
    SCOPED_TRACE(model);
    const Config config = parse_config(
        fmt::format("model: {{layers: 2, width: 16, inner: 20, heads: 4, vocab: 23, {}}}\n"
                    "train: {{optimizer: muon, sequence_length: 16, micro_batch: 1, batch: 1}}\n"
                    "data: {{task: {{type: mqar, pairs: 2}}}}\n"
                    "stages: [{{name: train, length: 1 steps}}]\n",
                    model),
        "test");
    const Transformer transformer(config.model, Recompute::kNone, 1);
    const auto optimizer = make_optimizer(config.train.optimizer);
    int taken = 0;
    for (const ParamUnit& unit : transformer.registry().units()) {
      for (const PlacedTensor& tensor : unit.tensors) {
        const bool matrix = optimizer->takes_matrix(tensor.spec);
        const bool gate = tensor.name.ends_with("self_attn.gate_proj.weight");  // of a convolution
        EXPECT_EQ(matrix, tensor.name.ends_with("_proj.weight") && !gate) << tensor.name;
        taken += matrix ? 1 : 0;
      }
    }
    EXPECT_GE(taken, 2 * 3);
  }
}

// ---- The average of the weights -----------------------------------------------------------------

std::vector<float> averaged(const std::vector<float>& average, const std::vector<float>& weights) {
  std::vector<float> next;
  for (size_t i = 0; i < average.size(); ++i) {
    next.push_back(0.75f * average[i] + (1.0f - 0.75f) * weights[i]);
  }
  return next;
}

TEST(Average, FollowsTheWeights) {
  const Config config = optimizer_config("ema: 0.75");
  for (const int world : {1, 2}) {
    const OptimizerResult before = run_optimizer(config, {.world = world});
    const OptimizerResult one = run_optimizer(config, {.world = world, .last = 1});
    OptimizerRun two{.world = world, .last = 2};
    two.bad_step = 1;  // skipped: the average stays
    for (const OptimizerResult& after : {one, run_optimizer(config, two)}) {
      for (const auto& [name, average] : before.tensors) {
        if (!name.starts_with("ema/")) continue;
        const std::string weights = "model/" + name.substr(4);
        EXPECT_EQ(average, before.tensors.at(weights)) << name;
        const std::vector<float>& now = after.tensors.at(name);
        const std::vector<float> expected = averaged(average, after.tensors.at(weights));
        for (size_t i = 0; i < now.size(); ++i) {
          EXPECT_NEAR(now[i], expected[i], 1e-6 * (std::abs(average[i]) + 1e-2)) << name;
        }
      }
    }
  }
}

TEST(Average, ChangesNoWeightAndResumesBitForBit) {
  const Config plain = optimizer_config("");
  const Config config = optimizer_config("ema: 0.75");
  const TemporaryFolder folder, old;
  const OptimizerResult straight = run_optimizer(config, {.last = 4});
  const OptimizerResult without = run_optimizer(plain, {.last = 4, .to = old.path()});
  for (const auto& [name, values] : without.tensors) EXPECT_EQ(values, straight.tensors.at(name));
  run_optimizer(config, {.world = 2, .last = 2, .to = folder.path()});
  const OptimizerRun rest{.world = 2, .first = 2, .last = 4, .from = folder.path()};
  EXPECT_EQ(run_optimizer(config, rest).tensors,
            run_optimizer(config, {.world = 2, .last = 4}).tensors);
  // An old run has none: it begins with the weights.
  const OptimizerResult begun =
      run_optimizer(config, {.world = 2, .first = 4, .last = 4, .from = old.path()});
  for (const auto& [name, values] : begun.tensors) {
    const bool average = name.starts_with("ema/");
    EXPECT_EQ(values, without.tensors.at(average ? "model/" + name.substr(4) : name)) << name;
  }
}

TEST(Average, CanBeReadAsTheWeights) {
  const Config config = optimizer_config("ema: 0.75");
  const TemporaryFolder folder, old;
  const OptimizerResult saved = run_optimizer(config, {.last = 2, .to = folder.path()});
  CheckpointReader reader(folder.path() / "checkpoints/step-00000002");
  reader.use_average();
  for (const std::string& name : reader.names(kModelKind)) {
    const std::vector<float>& expected = saved.tensors.at("ema/" + name);
    std::vector<float> values(expected.size());
    reader.read(kModelKind, name, 0, static_cast<int64_t>(values.size()), values.data());
    EXPECT_EQ(values, expected) << name;
  }
  run_optimizer(optimizer_config(""), {.last = 1, .to = old.path()});
  CheckpointReader none(old.path() / "checkpoints/step-00000001");
  try {
    none.use_average();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kConfig) << error.what();
  }
}

}  // namespace
}  // namespace sbtrain::test
