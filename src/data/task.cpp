#include "data/task.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/philox.h"
#include "data/draws.h"
#include "data/sample_order.h"

namespace sbtrain {
namespace {

// `count` slots, drawn without replacement with probabilities in proportion to `weights`. Each slot
// gets an exponential random time with its weight as the rate; the earliest times are drawn.
std::vector<int64_t> draw_slots(Draws& draws, const std::vector<double>& weights, int64_t count) {
  std::vector<double> rings;
  rings.reserve(weights.size());
  for (const double weight : weights) rings.push_back(-std::log1p(-draws.uniform()) / weight);
  std::vector<int64_t> slots(weights.size());
  std::iota(slots.begin(), slots.end(), 0);
  std::partial_sort(slots.begin(), slots.begin() + count, slots.end(), [&](int64_t a, int64_t b) {
    const double ring_a = rings[static_cast<size_t>(a)];
    const double ring_b = rings[static_cast<size_t>(b)];
    return ring_a < ring_b || (ring_a == ring_b && a < b);
  });
  slots.resize(static_cast<size_t>(count));
  return slots;
}

// An example's place in the batch, which holds filler without labels until the example is written.
struct Example {
  std::span<int32_t> tokens, targets;
  void pair(int64_t at, int32_t key, int32_t value) const {
    tokens[static_cast<size_t>(at)] = key;
    tokens[static_cast<size_t>(at + 1)] = value;
  }
  void label(int64_t at, int32_t value) const { targets[static_cast<size_t>(at)] = value; }
};

void write_mqar(const Example& example, Draws& draws, const TaskConfig& config, int64_t vocab,
                const std::vector<double>& slot_weights) {
  const int64_t half = vocab / 2;
  const std::vector<int32_t> keys = draw_distinct(draws, 1, half - 1, config.pairs);
  const std::vector<int32_t> values = draw_distinct(draws, half, vocab - half, config.pairs);
  const std::vector<int64_t> slots = draw_slots(draws, slot_weights, config.pairs);
  for (int64_t i = 0; i < config.pairs; ++i) {
    const auto n = static_cast<size_t>(i);
    example.pair(2 * i, keys[n], values[n]);
    const int64_t query = 2 * config.pairs + 2 * slots[n];
    example.tokens[static_cast<size_t>(query)] = keys[n];
    example.label(query, values[n]);
  }
}

void write_mqrar(const Example& example, Draws& draws, const TaskConfig& config, int64_t vocab) {
  const int64_t half = vocab / 2;
  const auto value = [&] { return static_cast<int32_t>(half + draws.below(vocab - half)); };
  const std::vector<int32_t> keys = draw_distinct(draws, 1, half - 1, config.pairs);
  std::vector<int32_t> current;
  for (int64_t i = 0; i < config.pairs; ++i) {
    current.push_back(value());
    example.pair(2 * i, keys[static_cast<size_t>(i)], current.back());
  }
  const int64_t slots = config.slots(static_cast<int64_t>(example.tokens.size()));
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t at = 2 * (config.pairs + slot);
    const auto asked = static_cast<size_t>(draws.below(config.pairs));
    example.label(at, current[asked]);
    current[asked] = value();
    example.pair(at, keys[asked], current[asked]);
  }
}

// Rows that name examples: one piece each, whose document is the example's index.
class TaskPacker : public Packer {
 public:
  TaskPacker(const Task& task, SourceCursor cursor)
      : examples_(task.config().examples),
        length_(task.length()),
        seed_(task.seed()),
        name_(task.fingerprint()),
        cursor_(cursor) {
    if (cursor.epoch < 0 || cursor.position < 0 || cursor.position >= examples_ ||
        cursor.offset != 0) {
      fail(ExitCode::kConfig, "data state: epoch {}, example {}, offset {} in a task of {}",
           cursor.epoch, cursor.position, cursor.offset, examples_);
    }
    shuffle();
  }

  Row next() override {
    Row row;
    row.pieces.push_back({.document = (*order_)(cursor_.position), .begin = 0, .length = length_});
    if (++cursor_.position == examples_) {
      cursor_ = {cursor_.epoch + 1, 0, 0};
      shuffle();
    }
    return row;
  }
  SourceCursor cursor() const override { return cursor_; }

 private:
  void shuffle() { order_.emplace(seed_, name_, static_cast<uint64_t>(cursor_.epoch), examples_); }

  int64_t examples_;
  int64_t length_;
  uint64_t seed_;
  std::string name_;
  SourceCursor cursor_;
  std::optional<Permutation> order_;
};

}  // namespace

Task::Task(const TaskConfig& config, int64_t vocab, int64_t length, uint64_t seed)
    : config_(config), vocab_(vocab), length_(length), seed_(seed) {
  const bool mqar = config.type == TaskKind::kMqar;
  require(config.active(), "a task of no kind");
  if (config.pairs < 1 || config.examples < 1 || config.pairs > vocab / 2 - 1 ||
      config.slots(length) < (mqar ? config.pairs : 1)) {
    fail(ExitCode::kConfig,
         "data.task: {} with {} pairs does not fit {} tokens of a vocabulary of {}; lower "
         "data.task.pairs",
         name_of(config.type), config.pairs, length, vocab);
  }
  for (int64_t g = 0; mqar && g < config.slots(length); ++g) {
    slot_weights_.push_back(std::pow(static_cast<double>(g + 1), config.query_power - 1));
  }
}

void Task::append_example(PackedBatch& batch, Split split, int64_t index) const {
  const size_t begin = batch.tokens.size();
  append_padding(batch, length_);
  const Example example{std::span(batch.tokens).subspan(begin),
                        std::span(batch.targets).subspan(begin)};
  const char* stream = split == Split::kTraining ? "training" : "held out";
  Draws draws(Philox(seed_, RandomPurpose::kTask, stream, static_cast<uint64_t>(index)));
  if (config_.type == TaskKind::kMqar) {
    write_mqar(example, draws, config_, vocab_, slot_weights_);
  } else {
    write_mqrar(example, draws, config_, vocab_);
  }
  batch.valid_targets += config_.targets(length_);
}

std::string Task::fingerprint() const {
  std::string text =
      fmt::format("{} pairs {} vocab {} length {} examples {}", name_of(config_.type),
                  config_.pairs, vocab_, length_, config_.examples);
  if (config_.type == TaskKind::kMqar) text += fmt::format(" query_power {}", config_.query_power);
  return text;
}

std::unique_ptr<Packer> make_task_packer(const Task& task, SourceCursor cursor) {
  return std::make_unique<TaskPacker>(task, cursor);
}

}  // namespace sbtrain
