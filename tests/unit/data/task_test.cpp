// MQAR and MQRAR: the content of examples, their distribution and their order.
#include "data/task.h"

#include <cmath>
#include <map>

#include "data/loader.h"
#include "unit/data/stores.h"

namespace sbtrain::test {
namespace {

TaskConfig task_config(TaskKind type, int64_t pairs, int64_t examples = 50) {
  TaskConfig config;
  config.type = type;
  config.pairs = pairs;
  config.examples = examples;
  return config;
}

PackedBatch example(const Task& task, int64_t index, Task::Split split = Task::Split::kTraining) {
  PackedBatch batch;
  clear(batch, task.length());
  task.append_example(batch, split, index);
  return batch;
}

struct Shape {
  int64_t pairs, vocab, length;
};
// The smallest sizes, odd sizes, and those of the papers.
const std::vector<Shape> kShapes = {
    {1, 4, 4}, {4, 11, 17}, {5, 64, 40}, {64, 8192, 256}, {192, 8192, 768}};

void expect_segment(const PackedBatch& batch, const Shape& shape) {
  const auto length = static_cast<size_t>(shape.length);
  ASSERT_EQ(batch.tokens.size(), length);
  ASSERT_EQ(batch.targets.size(), length);
  EXPECT_EQ(batch.cu_seqlens, (std::vector<int32_t>{0, static_cast<int32_t>(length)}));
  for (size_t i = 0; i < length; ++i) ASSERT_EQ(batch.positions[i], static_cast<int32_t>(i));
  EXPECT_EQ(batch.valid_targets, std::count_if(batch.targets.begin(), batch.targets.end(),
                                               [](int32_t target) { return target >= 0; }));
}

bool is_key(int32_t token, int64_t vocab) {
  return token >= 1 && token < vocab / 2;
}
bool is_value(int32_t token, int64_t vocab) {
  return token >= vocab / 2 && token < vocab;
}

TEST(Task, MqarAsksEachKeyOnceAndLabelsItsValue) {
  for (const Shape& shape : kShapes) {
    const Task task(task_config(TaskKind::kMqar, shape.pairs), shape.vocab, shape.length, 7);
    for (int64_t n = 0; n < 30; ++n) {
      const PackedBatch batch = example(task, n);
      expect_segment(batch, shape);
      EXPECT_EQ(batch.valid_targets, shape.pairs);
      std::map<int32_t, int32_t> value_of;
      std::set<int32_t> values;
      for (int64_t i = 0; i < shape.pairs; ++i) {
        const int32_t key = batch.tokens[static_cast<size_t>(2 * i)];
        const int32_t value = batch.tokens[static_cast<size_t>(2 * i + 1)];
        ASSERT_TRUE(is_key(key, shape.vocab) && is_value(value, shape.vocab));
        EXPECT_TRUE(value_of.emplace(key, value).second) << "a key twice";
        EXPECT_TRUE(values.insert(value).second) << "a value twice";
      }
      std::set<int32_t> asked;
      for (size_t at = 0; at < batch.tokens.size(); ++at) {
        const auto first = static_cast<size_t>(2 * shape.pairs);
        const bool query = at >= first && batch.tokens[at] != 0;
        ASSERT_EQ(batch.targets[at] >= 0, query);
        if (!query) continue;
        EXPECT_EQ((at - first) % 2, 0u);
        EXPECT_TRUE(asked.insert(batch.tokens[at]).second);
        EXPECT_EQ(batch.targets[at], value_of.at(batch.tokens[at]));
      }
      EXPECT_EQ(asked.size(), static_cast<size_t>(shape.pairs));
    }
  }
}

// Finds each answer by a walk back to the key's last occurrence, which the answer follows.
TEST(Task, MqrarLabelsTheCurrentValue) {
  for (const Shape& shape : kShapes) {
    const Task task(task_config(TaskKind::kMqrar, shape.pairs), shape.vocab, shape.length, 7);
    for (int64_t n = 0; n < 30; ++n) {
      const PackedBatch batch = example(task, n);
      expect_segment(batch, shape);
      EXPECT_EQ(batch.valid_targets, (shape.length - 2 * shape.pairs) / 2);
      const int64_t whole = shape.length / 2 * 2;
      std::set<int32_t> keys;
      for (int64_t at = 0; at < whole; at += 2) {
        const auto i = static_cast<size_t>(at);
        ASSERT_TRUE(is_key(batch.tokens[i], shape.vocab));
        ASSERT_TRUE(is_value(batch.tokens[i + 1], shape.vocab));
        ASSERT_EQ(batch.targets[i + 1], -1);
        if (at < 2 * shape.pairs) {
          EXPECT_TRUE(keys.insert(batch.tokens[i]).second) << "a key twice";
          ASSERT_EQ(batch.targets[i], -1);
          continue;
        }
        int64_t last = at - 2;
        while (last >= 0 && batch.tokens[static_cast<size_t>(last)] != batch.tokens[i]) last -= 2;
        ASSERT_GE(last, 0) << "a key that was not stated";
        ASSERT_EQ(batch.targets[i], batch.tokens[static_cast<size_t>(last + 1)]);
      }
      if (whole < shape.length) {
        EXPECT_EQ(batch.tokens.back(), 0);
      }
    }
  }
}

// Checks that |observed - n p| is within 5 standard deviations for each outcome.
void expect_frequencies(const std::vector<int64_t>& observed, const std::vector<double>& p) {
  double n = 0;
  for (const int64_t count : observed) n += static_cast<double>(count);
  for (size_t i = 0; i < p.size(); ++i) {
    const double deviation = std::sqrt(n * p[i] * (1 - p[i]));
    EXPECT_NEAR(static_cast<double>(observed[i]), n * p[i], 5 * deviation) << "outcome " << i;
  }
}

TEST(Task, TokensAreUniform) {
  constexpr int64_t kVocab = 42;  // 20 keys, 21 values
  for (const TaskKind type : {TaskKind::kMqar, TaskKind::kMqrar}) {
    const Task task(task_config(type, 3), kVocab, 60, 1);
    std::vector<int64_t> keys(20);
    std::vector<int64_t> values(21);
    std::vector<int64_t> asked(3);  // by the key's place in the prefix
    for (int64_t n = 0; n < 4000; ++n) {
      const PackedBatch batch = example(task, n);
      ++keys[static_cast<size_t>(batch.tokens[2] - 1)];  // one per example: independent
      ++values[static_cast<size_t>(batch.tokens[5] - kVocab / 2)];
      for (size_t at = 6; type == TaskKind::kMqrar && at < 60; at += 2) {
        for (size_t i = 0; i < 3; ++i) asked[i] += batch.tokens[at] == batch.tokens[2 * i];
      }
    }
    expect_frequencies(keys, std::vector<double>(20, 1.0 / 20));
    expect_frequencies(values, std::vector<double>(21, 1.0 / 21));
    if (type == TaskKind::kMqrar) expect_frequencies(asked, std::vector<double>(3, 1.0 / 3));
  }
}

// Slots follow p(g) ~ (g + 1)^(a - 1) without replacement. The distribution of the second key's
// slot is a sum over the slots of the first key.
TEST(Task, MqarPlacesQueriesByThePowerLaw) {
  TaskConfig config = task_config(TaskKind::kMqar, 2);
  for (const double power : {0.01, 0.5, 1.0}) {
    config.query_power = power;
    const Task task(config, 64, 2 * 2 + 2 * 6, 5);  // 6 slots
    std::vector<double> p(6);
    double sum = 0;
    for (size_t g = 0; g < 6; ++g) sum += p[g] = std::pow(static_cast<double>(g + 1), power - 1);
    for (double& value : p) value /= sum;
    std::vector<double> second(6);
    for (size_t first = 0; first < 6; ++first) {
      for (size_t g = 0; g < 6; ++g) {
        if (g != first) second[g] += p[first] * p[g] / (1 - p[first]);
      }
    }
    std::vector<std::vector<int64_t>> observed(2, std::vector<int64_t>(6));
    for (int64_t n = 0; n < 6000; ++n) {
      const PackedBatch batch = example(task, n);
      for (size_t g = 0; g < 6; ++g) {
        for (size_t i = 0; i < 2; ++i) {
          observed[i][g] += batch.tokens[4 + 2 * g] == batch.tokens[2 * i];
        }
      }
    }
    expect_frequencies(observed[0], p);
    expect_frequencies(observed[1], second);
  }
}

TEST(Task, ExamplesDependOnSeedSplitAndIndexAlone) {
  const Task task(task_config(TaskKind::kMqar, 4), 64, 32, 7);
  const Task same(task_config(TaskKind::kMqar, 4), 64, 32, 7);
  const Task other_seed(task_config(TaskKind::kMqar, 4), 64, 32, 8);
  EXPECT_EQ(example(task, 3).tokens, example(same, 3).tokens);
  EXPECT_NE(example(task, 3).tokens, example(other_seed, 3).tokens);
  PackedBatch together;  // after other examples in a batch
  clear(together, 96);
  for (const int64_t n : {9, 3, 1}) task.append_example(together, Task::Split::kTraining, n);
  const std::vector<int32_t> middle(together.tokens.begin() + 32, together.tokens.begin() + 64);
  EXPECT_EQ(middle, example(task, 3).tokens);
  EXPECT_EQ(together.cu_seqlens, (std::vector<int32_t>{0, 32, 64, 96}));
  EXPECT_EQ(together.valid_targets, 12);
}

TEST(Task, TrainingAndHeldOutExamplesAreDisjoint) {
  for (const TaskKind type : {TaskKind::kMqar, TaskKind::kMqrar}) {
    const Task task(task_config(type, 4), 64, 32, 7);
    std::set<std::vector<int32_t>> seen;
    for (int64_t n = 0; n < 3000; ++n) {
      EXPECT_TRUE(seen.insert(example(task, n).tokens).second);
      EXPECT_TRUE(seen.insert(example(task, n, Task::Split::kHeldOut).tokens).second);
    }
  }
}

TEST(Task, RefusesWhatDoesNotFit) {
  EXPECT_EQ(thrown_by([] { Task(task_config(TaskKind::kMqar, 5), 64, 19, 1); }).code,
            ExitCode::kConfig);
  EXPECT_EQ(thrown_by([] { Task(task_config(TaskKind::kMqar, 5), 64, 20, 1); }).code,
            ExitCode::kDone);
  EXPECT_EQ(thrown_by([] { Task(task_config(TaskKind::kMqar, 5), 11, 20, 1); }).code,
            ExitCode::kConfig);
  EXPECT_EQ(thrown_by([] { Task(task_config(TaskKind::kMqrar, 5), 12, 12, 1); }).code,
            ExitCode::kDone);
  EXPECT_EQ(thrown_by([] { Task(task_config(TaskKind::kMqrar, 5), 12, 11, 1); }).code,
            ExitCode::kConfig);
}

LoaderOptions task_loader(int rank = 0, int world = 1) {
  LoaderOptions o;
  o.task = task_config(TaskKind::kMqrar, 4, 50);
  o.task_vocab = 64;
  o.sequence_length = 24;
  o.micro_batch = 2;
  o.batch = 8;
  o.seed = 5;
  o.rank = rank;
  o.world = world;
  return o;
}

using Rows = std::vector<std::vector<int32_t>>;

void append_rows(const PackedBatch& batch, int64_t length, Rows& rows) {
  for (auto at = batch.tokens.begin(); at != batch.tokens.end(); at += length) {
    rows.emplace_back(at, at + length);
  }
}

// The rows of `steps` steps in the global order, put together from all ranks.
Rows global_rows(int world, int64_t micro_batch, int steps) {
  std::vector<Rows> of_rank(static_cast<size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    LoaderOptions options = task_loader(rank, world);
    options.micro_batch = micro_batch;
    Loader loader(options);
    for (int64_t i = 0; i < steps * loader.micro_batches_per_step(); ++i) {
      append_rows(loader.next(), options.sequence_length, of_rank[static_cast<size_t>(rank)]);
    }
  }
  Rows rows;
  const auto each = static_cast<ptrdiff_t>(8 / world);
  for (ptrdiff_t step = 0; step < steps; ++step) {
    for (const Rows& part : of_rank) {
      rows.insert(rows.end(), part.begin() + step * each, part.begin() + (step + 1) * each);
    }
  }
  return rows;
}

TEST(Task, SameOrderForEveryWorldSizeAndMicroBatch) {
  const Rows rows = global_rows(1, 8, 20);
  EXPECT_EQ(global_rows(1, 1, 20), rows);
  EXPECT_EQ(global_rows(2, 2, 20), rows);
  EXPECT_EQ(global_rows(4, 1, 20), rows);
}

TEST(Task, AnEpochIsEachExampleOnceInItsOwnOrder) {
  const Rows rows = global_rows(1, 8, 25);  // 4 epochs of 50
  const LoaderOptions options = task_loader();
  const Task task(options.task, options.task_vocab, options.sequence_length, options.seed);
  std::set<std::vector<int32_t>> all;
  for (int64_t n = 0; n < 50; ++n) all.insert(example(task, n).tokens);
  std::set<Rows> orders;
  for (ptrdiff_t epoch = 0; epoch < 4; ++epoch) {
    const Rows order(rows.begin() + 50 * epoch, rows.begin() + 50 * (epoch + 1));
    EXPECT_EQ(std::set<std::vector<int32_t>>(order.begin(), order.end()), all);
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 4u);
}

TEST(Task, LoaderResumesExactlyAfterEveryMicroBatch) {
  std::vector<PackedBatch> batches;
  std::vector<std::string> states;
  Loader loader(task_loader());
  for (int i = 0; i < 60; ++i) {  // into the third epoch
    states.push_back(loader.state().to_json());
    batches.push_back(loader.next());
  }
  for (size_t i = 0; i < states.size(); i += 7) {
    const LoaderState state = LoaderState::from_json(states[i]);
    Loader resumed(task_loader(), &state);
    for (size_t k = i; k < std::min(i + 9, batches.size()); ++k) {
      const PackedBatch batch = resumed.next();
      ASSERT_EQ(batch.tokens, batches[k].tokens);
      ASSERT_EQ(batch.targets, batches[k].targets);
    }
  }
}

TEST(Task, AnotherTaskIsRefusedOnResume) {
  Loader loader(task_loader());
  for (int i = 0; i < 4; ++i) loader.next();
  const LoaderState state = loader.state();
  LoaderOptions other = task_loader();
  other.task.pairs = 5;
  const Thrown thrown = thrown_by([&] { Loader(other, &state); });
  EXPECT_EQ(thrown.code, ExitCode::kConfig);
  EXPECT_TRUE(thrown.says("mqrar pairs 4")) << thrown.message;
}

}  // namespace
}  // namespace sbtrain::test
