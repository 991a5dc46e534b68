#include "config/validate.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <utility>

#include "attention/registry.h"
#include "config/schema.h"
#include "config/values.h"
#include "core/error.h"
#include "optim/schedule.h"

namespace sbtrain {
namespace schema {
namespace {

constexpr const char* kTaskAndFiles =
    "data.task makes its own data; leave out the files or the task";

constexpr double kMostTokens = 4e18;  // of a run; half of what 64 bits count

class Checker {
 public:
  explicit Checker(const Config& config) : config_(config) {}

  std::vector<CrossProblem> check() {
    check_run();
    check_model();
    check_train();
    check_sources("data.sources", config_.data.sources);
    check_paths();
    check_task();
    check_stages();
    if (problems_.empty()) check_schedule();
    return std::move(problems_);
  }

 private:
  template <typename... Args>
  void problem(std::string key, fmt::format_string<Args...> format, Args&&... args) {
    problems_.push_back({std::move(key), fmt::format(format, std::forward<Args>(args)...)});
  }

  void check_run() {
    const std::string& name = config_.name;
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos) {
      problem("name", "{} cannot name a folder; use a plain word, or set `out` for a path",
              in_quotes(name));
    }
    if (config_.checkpoint.resume.empty()) {
      problem("checkpoint.resume", "is empty; use auto, none, last-good, a step or a path");
    }
  }

  void check_model() {
    const ModelConfig& model = config_.model;
    const AttentionRegistry& registry = attention_registry();
    for (const AttentionConfig& attention : model.attention) {
      const auto found = heads_problem(registry.at(attention.type), model);
      if (!found) continue;
      problem("model." + found->key, "{}", found->message);
      return;
    }
    for (const AttentionConfig& attention : model.attention) {
      const std::string found = key_heads_problem(registry.at(attention.type), model);
      if (found.empty()) continue;
      problem("model.kv_heads", "{}", found);
      break;
    }
    const auto plain = [&](const AttentionConfig& attention) {
      return registry.at(attention.type).projects_output && !attention.output_bias;
    };
    if (model.residual_multiplier != 1.0 &&
        (model.mlp != MlpKind::kSwiGlu || !std::ranges::all_of(model.attention, plain))) {
      problem("model.residual_multiplier",
              "other than 1 it needs mlp swiglu and attention with an output projection without "
              "bias");
    }
    if (model.residual_multiplier != 1.0 && model.norm_position == NormPosition::kOutput) {
      problem(
          "model.residual_multiplier",
          "other than 1 it needs norm_position input: a norm at the output takes the factor out "
          "again, and has weights of its own");
    }
    if (model.position == PositionEmbedding::kLearned &&
        model.max_positions < config_.train.sequence_length) {
      problem("model.max_positions",
              "{} learned positions do not reach over sequences of {} tokens", model.max_positions,
              config_.train.sequence_length);
    }
    const auto count = static_cast<int64_t>(model.attention.size());
    if (count == 0) {
      problem("model.attention", "the list is empty; name at least one attention module");
    } else if (model.layers % count != 0) {
      problem("model.attention", "{} modules cannot be repeated evenly over {} layers", count,
              model.layers);
    }
    for (size_t i = 0; i < model.attention.size(); ++i) {
      const std::string key = count == 1 ? "model.attention" : fmt::format("model.attention.{}", i);
      const AttentionConfig& attention = model.attention[i];
      for (const OptionProblem& found :
           registry.at(attention.type).check(attention.options, model)) {
        problem(fmt::format("{}.{}", key, found.key), "{}", found.message);
      }
    }
  }

  void check_train() {
    const TrainConfig& train = config_.train;
    if (train.micro_batch < 1 || train.batch % train.micro_batch != 0) {
      problem("train.batch", "{} is not a multiple of micro_batch {}", train.batch,
              train.micro_batch);
    }
    if (train.micro_batch > std::numeric_limits<int32_t>::max() / train.sequence_length) {
      problem("train.micro_batch", "micro_batch x sequence_length exceeds 2147483647 tokens");
    }
    if (train.reduce_engine == TransferEngine::kCopyEngines &&
        train.gather_engine != TransferEngine::kCopyEngines) {
      problem("train.reduce_engine",
              "copy_engines needs train.gather_engine copy_engines too: both use the same memory, "
              "which NCCL then gathers by the copy engines in any case");
    }
    if (train.offload != Offload::kNone && train.cuda_graph == CudaGraph::kOn) {
      problem("train.offload",
              "{} copies on a stream of its own, which is no part of a graph: set "
              "train.cuda_graph to auto or false, or train.offload to none",
              name_of(train.offload));
    }
    check_context();
    int64_t gpus = 0;
    if (train.gpus != "auto" && (!from_text(train.gpus, gpus) || gpus < 1 || gpus > 1024)) {
      problem("train.gpus", "expected auto or a number from 1 to 1024, got {}",
              in_quotes(train.gpus));
    }
  }

  // Whether ranks can share sequences.
  void check_context() {
    const TrainConfig& train = config_.train;
    const int64_t ranks = train.context_parallel;
    if (ranks == 1) return;
    if (train.micro_batch * train.sequence_length % ranks != 0) {
      problem("train.context_parallel", "{} ranks cannot share {} tokens (micro_batch {} of {})",
              ranks, train.micro_batch * train.sequence_length, train.micro_batch,
              train.sequence_length);
    } else if (train.context_layout == ContextLayout::kFolded &&
               train.micro_batch * train.sequence_length % (2 * ranks) != 0) {
      problem("train.context_layout", "{} tokens cannot be folded: {} ranks take two of {} parts",
              train.micro_batch * train.sequence_length, ranks, 2 * ranks);
    }
    for (const AttentionConfig& attention : config_.model.attention) {
      const AttentionModule& module = attention_registry().at(attention.type);
      const std::string found = module.context_problem(attention.options);
      if (found.empty()) continue;
      problem("train.context_parallel", "{}: {}", attention.type, found);
      return;
    }
  }

  void check_sources(const std::string& key, const std::vector<SourceConfig>& sources) {
    std::set<std::string> seen;
    for (size_t i = 0; i < sources.size(); ++i) {
      const std::string path_key = fmt::format("{}.{}.path", key, i);
      if (sources[i].path.empty()) problem(path_key, "is empty");
      if (!seen.insert(sources[i].path).second) {
        problem(path_key, "{} is in this mixture already; give it more weight instead",
                in_quotes(sources[i].path));
      }
    }
  }

  void check_paths() {
    for (size_t i = 0; i < config_.data.validation.size(); ++i) {
      if (config_.data.validation[i].empty())
        problem(fmt::format("data.validation.{}", i), "is empty");
    }
  }

  void check_task() {
    const TaskConfig& task = config_.data.task;
    if (!task.active()) {
      for_each_duration(config_, [&](const std::string& key, const Duration& duration) {
        if (duration.unit != Duration::Unit::kEpochs) return;
        problem(key,
                "epochs count the examples of data.task, and there is none; give steps or "
                "tokens");
      });
      if (config_.validation.stop_accuracy > 0) {
        problem("validation.stop_accuracy", "only a data.task has an accuracy");
      }
      return;
    }
    if (!config_.data.sources.empty()) problem("data.sources", "{}", kTaskAndFiles);
    if (!config_.data.validation.empty()) problem("data.validation", "{}", kTaskAndFiles);
    const int64_t keys = config_.model.vocab / 2 - 1;
    if (task.pairs > keys) {
      problem("data.task.pairs", "{} keys, but a vocabulary of {} has {}", task.pairs,
              config_.model.vocab, keys);
    }
    const int64_t length = config_.train.sequence_length;
    const int64_t needed = 2 * task.pairs + (task.type == TaskKind::kMqar ? 2 * task.pairs : 2);
    if (length < needed) {
      problem("data.task.pairs", "{} with {} pairs needs sequences of at least {} tokens, not {}",
              name_of(task.type), task.pairs, needed, length);
    }
  }

  void check_stages() {
    if (config_.stages.empty()) {
      problem("stages", "there is no stage, so nothing to do; give at least one with a length");
    }
    // Steps and tokens are counted in 64 bits.
    double steps_left = kMostTokens / static_cast<double>(config_.train.tokens_per_step());
    std::set<std::string> names;
    for (size_t i = 0; i < config_.stages.size(); ++i) {
      check_stage(i);
      const Duration& length = config_.stages[i].length;
      steps_left -= static_cast<double>(length.steps(config_.train.tokens_per_step()));
      if (steps_left < 0) {
        problem(fmt::format("stages.{}.length", i),
                "the stages up to this one have more than {:g} tokens together", kMostTokens);
        return;
      }
      if (!names.insert(config_.stages[i].name).second) {
        problem(fmt::format("stages.{}.name", i), "{} names an earlier stage too",
                in_quotes(config_.stages[i].name));
      }
    }
  }

  void check_stage(size_t i) {
    const StageConfig& stage = config_.stages[i];
    const std::string key = fmt::format("stages.{}", i);
    if (stage.name.empty()) problem(key + ".name", "is empty");
    if (stage.length.count < 1) problem(key + ".length", "the stage has no length");
    if (i == 0 && stage.schedule.type == ScheduleKind::kExponential) {
      problem(key + ".schedule.type",
              "exponential continues from the previous stage, and the first has none");
    }
    const int64_t tokens = config_.train.tokens_per_step();
    const int64_t warmup = stage.schedule.warmup.steps(tokens);
    if (stage.length.count > 0 && warmup > stage.length.steps(tokens)) {
      problem(key + ".schedule.warmup", "{} is longer than the stage ({})",
              to_text(stage.schedule.warmup), to_text(stage.length));
    }
    check_sources(key + ".sources", stage.sources);
    if (config_.data.task.active()) {
      if (!stage.sources.empty()) problem(key + ".sources", "{}", kTaskAndFiles);
    } else if (stage.sources.empty() && config_.data.sources.empty()) {
      problem(key + ".sources", "there is no training data; set data.sources or the stage's own");
    }
  }

  // Why the first `count` stages cannot be scheduled, or nothing.
  std::string schedule_problem(size_t count) const {
    const auto end = config_.stages.begin() + static_cast<ptrdiff_t>(count);
    try {
      const Schedule possible({config_.stages.begin(), end}, config_.train.lr, config_.train.batch,
                              config_.train.tokens_per_step());
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  }

  // What only the schedule itself knows, such as that parts of a stage overlap.
  void check_schedule() {
    size_t bad = config_.stages.size();
    if (schedule_problem(bad).empty()) return;
    for (size_t good = 0; bad - good > 1;) {
      const size_t middle = good + (bad - good) / 2;
      (schedule_problem(middle).empty() ? good : bad) = middle;
    }
    problem(fmt::format("stages.{}.schedule", bad - 1), "{}", schedule_problem(bad));
  }

  const Config& config_;
  std::vector<CrossProblem> problems_;
};

}  // namespace

std::vector<CrossProblem> cross_field_problems(const Config& config) {
  return Checker(config).check();
}

}  // namespace schema

void validate_config(const Config& config) {
  std::string text;
  for (const schema::CrossProblem& problem : schema::cross_field_problems(config)) {
    if (!text.empty()) text += '\n';
    text += fmt::format("configuration: {}: {}", problem.key, problem.message);
  }
  if (!text.empty()) fail(ExitCode::kConfig, "{}", text);
}

}  // namespace sbtrain
