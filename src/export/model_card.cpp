#include "export/model_card.h"

#include <fmt/ranges.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <set>

#include "config/schema.h"
#include "core/version.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

struct Validation {
  int64_t step = 0;
  double loss = 0;
};

// The last validation at or before the checkpoint's step, from <run>/metrics.jsonl. Lines that
// cannot be read are passed over: a card may do without the figure.
std::optional<Validation> last_validation(const CheckpointReader& checkpoint) {
  const fs::path run = fs::absolute(checkpoint.folder()).parent_path().parent_path();
  const fs::path file = run / "metrics.jsonl";
  std::error_code unreadable;
  if (!fs::is_regular_file(file, unreadable)) return std::nullopt;
  std::optional<Validation> last;
  std::ifstream lines(file);
  for (std::string line; std::getline(lines, line);) {
    if (line.find("\"validation/loss\"") == std::string::npos) continue;
    const nlohmann::json record = nlohmann::json::parse(line, nullptr, /*exceptions=*/false);
    if (!record.is_object() || !record.contains("step") || !record["step"].is_number_integer() ||
        !record["validation/loss"].is_number()) {
      continue;
    }
    const auto step = record["step"].get<int64_t>();
    if (step <= checkpoint.manifest().step) {
      last = {.step = step, .loss = record["validation/loss"].get<double>()};
    }
  }
  return last;
}

std::string data_of(const Config& config) {
  if (config.data.task.active()) {
    return fmt::format("the synthetic task {}", name_of(config.data.task.type));
  }
  std::vector<std::string> parts;
  std::set<std::string> seen;
  const auto add = [&](const std::vector<SourceConfig>& sources) {
    for (const SourceConfig& source : sources) {
      std::string part = fmt::format("`{}` (weight {})", source.path, source.weight);
      if (seen.insert(part).second) parts.push_back(std::move(part));
    }
  };
  add(config.data.sources);
  for (const StageConfig& stage : config.stages) add(stage.sources);
  return fmt::format("{}", fmt::join(parts, ", "));
}

int64_t parameters_of(const HfLayout& layout) {
  int64_t count = 0;
  for (const ExportTensor& tensor : layout.tensors) count += checked_numel(tensor.shape);
  return count;
}

}  // namespace

std::string model_card(const CheckpointReader& checkpoint, const Config& config,
                       const HfLayout& layout, bool average) {
  const Manifest& manifest = checkpoint.manifest();
  // Without it both calls ask on a terminal whether the folder's code may run.
  const char* trust = layout.own_code ? ", trust_remote_code=True" : "";
  std::string text = fmt::format(
      "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [sbtrain]\n---\n\n"
      "# {}\n\nA language model of {} parameters, pretrained with sbtrain {} and stored as "
      "`{}`.\n\n"
      "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
      "model = AutoModelForCausalLM.from_pretrained(\"PATH\"{})\n"
      "tokenizer = AutoTokenizer.from_pretrained(\"PATH\"{})\n```\n\n"
      "| | |\n|---|---|\n| steps | {} |\n| tokens trained on | {} |\n| data | {} |\n",
      config.name, parameters_of(layout), version(), layout.architecture, trust, trust,
      manifest.step, manifest.tokens, data_of(config));
  if (average) {
    text += fmt::format("| weights | a running average of the run's, of decay {} |\n",
                        config.train.ema);
  } else if (const auto validation = last_validation(checkpoint)) {
    text += fmt::format("| validation loss | {:.4f} nats per token, at step {} |\n",
                        validation->loss, validation->step);
  }
  if (layout.config.at("model_type") == "stickbreaking_attn") {
    text +=
        "\n`import fla.models` makes the architecture known; it runs on a GPU, without a cache.\n";
  }
  const std::string yaml = config_yaml(config);
  return text + "\n## Configuration of the run\n\n```yaml\n" + yaml + "```\n";
}

}  // namespace sbtrain
