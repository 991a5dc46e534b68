// A gradient that is not finite on one of several ranks: all ranks skip the step alike, and go on
// as if it had never been, or give up at the same step. The ranks are threads on the CPU.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/log.h"
#include "parallel/param_shards.h"
#include "support/model.h"
#include "support/thread_world.h"
#include "train/guard.h"
#include "train/step.h"

namespace sbtrain::test {
namespace {

constexpr int32_t kLength = 16;
constexpr int32_t kVocab = 23;
constexpr int64_t kSequences = 8;  // of a step
constexpr double kRate = 1e-2;

// What one rank contributes to the sums over gradients, damaged in one place.
struct Damage {
  int rank = 0;
  int sum = 0;              // which of the step's sums over this rank's gradients
  uint32_t bits = 0;        // of the f32 that is put there; bf16 has its upper half
  double place = 0;         // from 0, the first element, to below 1
  bool everywhere = false;  // on all ranks, not on one
};

// Ranks as `inner`, which meet there; what this rank gives to a sum over gradients is damaged on
// its way.
class DamagedRank : public Communicator {
 public:
  // What all groups of one rank share.
  struct State {
    int world_rank = 0;
    std::optional<Damage> damage;
    int sums = 0;                  // over gradients, since the step began
    bool matrices_travel = false;  // all-to-alls carry matrices to their owners, and no gradients
  };
  DamagedRank(std::unique_ptr<Communicator> inner, std::shared_ptr<State> state)
      : inner_(std::move(inner)), state_(std::move(state)) {}

  int rank() const override { return inner_->rank(); }
  int world() const override { return inner_->world(); }
  void sum(std::span<double> values) override { inner_->sum(values); }
  std::string broadcast(std::string value, int root) override {
    return inner_->broadcast(std::move(value), root);
  }
  std::vector<std::string> all_gather(std::string value) override {
    return inner_->all_gather(std::move(value));
  }
  void barrier() override { inner_->barrier(); }
  std::unique_ptr<Communicator> split(const ColorOf& color_of) override {
    return std::make_unique<DamagedRank>(inner_->split(color_of), state_);
  }

 protected:
  void run_all_gather(Stream& s, const Tensor& full, const Tensor& shard) override {
    inner_->all_gather(s, full, shard);
  }
  void run_reduce_scatter(Stream& s, const Tensor& shard, const Tensor& full) override {
    damage(full);
    inner_->reduce_scatter(s, shard, full);
  }
  void run_all_to_all(Stream& s, const Tensor& to, const Tensor& from) override {
    if (!state_->matrices_travel) damage(from);
    inner_->all_to_all(s, to, from);
  }
  void run_shift(Stream& s, const Tensor& to, const Tensor& from, Neighbours ring) override {
    inner_->shift(s, to, from, ring.target - rank());
  }
  void run_all_reduce(Stream& s, const Tensor& x) override {
    damage(x);
    inner_->all_reduce(s, x);
  }
  void run_broadcast(Stream& s, const Tensor& x, int root) override {
    inner_->broadcast(s, x, root);
  }

 private:
  void damage(const Tensor& x) {
    if (x.dtype == DType::kF64) return;  // the numbers of the step
    const int sum = state_->sums++;
    if (!state_->damage || state_->damage->sum != sum) return;
    const Damage& d = *state_->damage;
    if (d.rank != state_->world_rank && !d.everywhere) return;
    const auto at = static_cast<size_t>(d.place * static_cast<double>(x.numel()));
    if (x.dtype == DType::kBF16) {
      static_cast<uint16_t*>(x.data)[at] = static_cast<uint16_t>(d.bits >> 16);
    } else {
      static_cast<uint32_t*>(x.data)[at] = d.bits;
    }
  }

  std::unique_ptr<Communicator> inner_;
  std::shared_ptr<State> state_;
};

struct Case {
  Sharding sharding = Sharding::kFull;
  int world = 2;
  int node_size = 1;
  bool tied = false;
  ReduceType reduce = ReduceType::kFloat32;
  TransferEngine engine = TransferEngine::kMultiprocessors;
  std::string optimizer = "adamw";  // muon, whose matrices travel: not with kCopyEngines
  std::string name() const {
    return fmt::format("{}{}{}{}{}{}", name_of(sharding), world, tied ? "Tied" : "",
                       reduce == ReduceType::kBfloat16 ? "Bf16" : "",
                       engine == TransferEngine::kCopyEngines ? "ByCopies" : "",
                       optimizer == "muon" ? "Muon" : "");
  }
};
void PrintTo(const Case& c, std::ostream* out) {  // NOLINT: GoogleTest's name
  *out << c.name();
}

Config config_of(const Case& c) {
  Config config;
  config.model.layers = 2;
  config.model.width = 12;  // no multiple of the alignment, so that shards cut through tensors
  config.model.inner = 20;
  config.model.heads = 2;
  config.model.vocab = kVocab;
  config.model.init_std = 0.3;
  config.model.tied = c.tied;
  config.train.sequence_length = kLength;
  config.train.micro_batch = 1;
  config.train.batch = kSequences;
  config.train.sharding = c.sharding;
  config.train.reduce_dtype = c.reduce;
  config.train.reduce_engine = c.engine;
  config.train.optimizer.type = c.optimizer;
  return config;
}

// A rank with its part of the model.
class Rank {
 public:
  Rank(const Case& c, Communicator& ranks)
      : config_(config_of(c)),
        mesh_(ranks, c.sharding, c.node_size),
        model_(config_.model, Recompute::kNone, mesh_.shard_count()),
        memory_(Backend::kCpu),
        stream_(memory_),
        step_(config_, model_, stream_, mesh_) {
    step_.params().initialize(3);
  }

  StepResult step(int n) {
    const int64_t share = kSequences / mesh_.world().world();
    std::vector<PackedBatch> batches;
    for (int64_t m = 0; m < share; ++m) {
      const auto index = static_cast<uint64_t>(n * kSequences + share * mesh_.world().rank() + m);
      const auto cut = static_cast<int32_t>(1 + index % (kLength - 1));
      batches.push_back(packed_batch({cut, kLength - cut}, kVocab, index));
    }
    return step_.run(batches, kRate).wait();
  }
  // The bits of this rank's weights and moments.
  std::vector<uint32_t> state() {
    std::vector<uint32_t> bits;
    for (const TensorShard& part : tensor_shards(step_.params(), /*with_state=*/true)) {
      for (int64_t i = 0; i < part.stored.numel(); ++i) {
        bits.push_back(std::bit_cast<uint32_t>(part.stored.f32()[i]));
      }
    }
    return bits;
  }

 private:
  const Config config_;
  const Mesh mesh_;
  const Transformer model_;
  Memory memory_;
  Stream stream_;
  TrainStep step_;
};

struct Result {
  uint64_t loss = 0, norm = 0;  // bits
  int64_t updates = 0;
  bool finite = false;
  bool operator==(const Result&) const = default;
};
Result result_of(const StepResult& r) {
  return {std::bit_cast<uint64_t>(r.loss), std::bit_cast<uint64_t>(r.grad_norm), r.updates,
          std::isfinite(r.loss) && std::isfinite(r.grad_norm)};
}

// What a rank saw, and holds in the end.
struct Seen {
  std::vector<Result> steps;
  std::vector<uint32_t> state;
  int sums = 0;  // over gradients, in the last step
  int gave_up_after = -1;
  bool operator==(const Seen&) const = default;
};

// Steps 0, 1 and 2 on all ranks; between the first two, one step more for each damage.
std::vector<Seen> train(const Case& c, const std::vector<Damage>& damages,
                        int64_t max_bad_steps = 1000) {
  std::vector<Seen> seen(static_cast<size_t>(c.world));
  run_ranks(c.world, [&](Communicator& ranks) {
    // The communicator belongs to the caller, who outlives what wraps it.
    const auto state = std::make_shared<DamagedRank::State>();
    state->world_rank = ranks.rank();
    state->matrices_travel = c.optimizer == "muon";
    DamagedRank damaged(ranks.split([](int) { return 0; }), state);
    Rank rank(c, damaged);
    Seen& mine = seen[static_cast<size_t>(ranks.rank())];
    Guard guard(max_bad_steps);
    const auto step = [&](int n, const std::optional<Damage>& damage) {
      state->damage = damage;
      state->sums = 0;
      const StepResult result = rank.step(n);
      mine.steps.push_back(result_of(result));
      mine.sums = state->sums;
      guard.accept(n, result.loss, result.grad_norm * result.grad_norm, kRate);
    };
    try {
      step(0, std::nullopt);
      for (const Damage& damage : damages) step(7, damage);
      step(1, std::nullopt);
      step(2, std::nullopt);
    } catch (const Error& error) {
      if (error.code() != ExitCode::kDiverged) throw;
      mine.gave_up_after = static_cast<int>(mine.steps.size());
    }
    mine.state = rank.state();
  });
  return seen;
}

constexpr uint32_t kInf = 0x7f800000;
constexpr uint32_t kLargest = 0x7f7f0000;  // of bf16; the sum of two is infinite
// Infinities, and NaN that are quiet, signalling, negative, and those that carry into the exponent
// or the sign when they are rounded as numbers are.
constexpr std::array<uint32_t, 7> kBad = {kInf,       kInf | 0x80000000, 0x7fc00000, 0x7fa00000,
                                          0xffc12345, 0x7fffffff,        0xffffffff};

class BadGradient : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override { limit_log_sinks(LogLevel::kError); }  // thousands of steps are skipped
};

TEST_P(BadGradient, IsSkippedByAllRanksAndLeavesNoTrace) {
  const Case& c = GetParam();
  const std::vector<Seen> clean = train(c, {});
  const int sums = clean[0].sums;
  ASSERT_GE(sums, 4);  // of the embedding, two blocks and what follows them
  std::vector<Damage> damages;
  int n = 0;
  for (const uint32_t bits : kBad) {
    for (int sum = 0; sum < sums; ++sum, ++n) {
      damages.push_back({.rank = n % c.world, .sum = sum, .bits = bits, .place = n % 4 * 0.25});
    }
  }
  for (int sum = 0; sum < sums; ++sum) {  // finite on each rank, and infinite in the sum
    damages.push_back({.sum = sum, .bits = kLargest, .everywhere = true});
  }
  const std::vector<Seen> seen = train(c, damages);
  const auto bad = static_cast<ptrdiff_t>(damages.size());
  for (size_t rank = 0; rank < seen.size(); ++rank) {
    SCOPED_TRACE(fmt::format("rank {}", rank));
    ASSERT_EQ(seen[rank].steps, seen[0].steps);
    for (ptrdiff_t i = 1; i <= bad; ++i) {
      const Result& result = seen[rank].steps[static_cast<size_t>(i)];
      const Damage& damage = damages[static_cast<size_t>(i - 1)];
      EXPECT_FALSE(result.finite) << fmt::format("{:#x} in sum {}", damage.bits, damage.sum);
      EXPECT_EQ(result.updates, 1);
    }
    std::vector<Result> without = seen[rank].steps;
    without.erase(without.begin() + 1, without.begin() + 1 + bad);
    EXPECT_EQ(without, clean[rank].steps);
    EXPECT_TRUE(seen[rank].state == clean[rank].state) << "weights or moments differ";
  }
}

TEST_P(BadGradient, EndsAllRanksAtTheSameStep) {
  const Case& c = GetParam();
  std::vector<Damage> damages;
  for (int n = 0; n < 6; ++n) damages.push_back({.rank = n % c.world, .sum = n % 4, .bits = kInf});
  const std::vector<Seen> clean = train(c, {});
  for (const Seen& seen : train(c, damages, /*max_bad_steps=*/4)) {
    EXPECT_EQ(seen.gave_up_after, 5);  // a good step, and four in a row that are not
    EXPECT_EQ(seen.steps.front(), clean[0].steps.front());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, BadGradient,
    testing::Values(
        Case{Sharding::kFull, 2}, Case{Sharding::kFull, 4, 1, true},
        Case{Sharding::kGrad, 2, 1, true}, Case{Sharding::kGrad, 4}, Case{Sharding::kNone, 2},
        Case{Sharding::kNone, 4, 1, true}, Case{Sharding::kHybrid, 4, 2},
        Case{Sharding::kHybrid, 8, 2, true},
        Case{Sharding::kFull, 2, 1, false, ReduceType::kBfloat16},
        Case{Sharding::kNone, 4, 1, false, ReduceType::kBfloat16},
        Case{Sharding::kHybrid, 4, 2, true, ReduceType::kBfloat16},
        Case{Sharding::kFull, 4, 1, false, ReduceType::kFloat32, TransferEngine::kCopyEngines},
        Case{Sharding::kHybrid, 8, 4, false, ReduceType::kBfloat16, TransferEngine::kCopyEngines},
        Case{.world = 4, .tied = true, .optimizer = "muon"},
        Case{.sharding = Sharding::kGrad, .world = 2, .optimizer = "muon"},
        Case{.sharding = Sharding::kNone, .world = 2, .optimizer = "muon"},
        Case{.sharding = Sharding::kHybrid, .world = 4, .node_size = 2, .optimizer = "muon"}),
    [](const auto& info) { return info.param.name(); });

}  // namespace
}  // namespace sbtrain::test
