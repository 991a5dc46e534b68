#include "export/verify_export.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/python.h"
#include "export/float_format.h"
#include "export/python.h"
#include "ops/memory.h"
#include "parallel/param_shards.h"
#include "serve/inference.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

constexpr int64_t kTokens = 48;
constexpr int kMissing = 77;

std::string without_newline(std::string text) {
  while (text.ends_with('\n')) text.pop_back();
  return text;
}

// The kind of model for verify_logits.py.
const char* kind_of(const HfLayout& layout) {
  return layout.own_code ? "own" : "transformers";
}

// The weights as the folder has them: multiplied and rounded, and divided again.
void round_weights(ShardedParams& params, const HfLayout& layout, FileDType dtype) {
  for (const TensorShard& shard : tensor_shards(params, /*with_state=*/false)) {
    const auto tensor = std::ranges::find_if(layout.tensors, [&](const ExportTensor& t) {
      return std::ranges::count(t.sources, shard.name) > 0;
    });
    require(tensor != layout.tensors.end(), "{} is not exported", shard.name);
    float* values = shard.stored.f32();
    uint16_t rounded[2];
    for (int64_t i = 0; i < shard.stored.numel(); ++i) {
      const auto scaled = static_cast<float>(static_cast<double>(values[i]) * tensor->factor);
      float stored = 0;
      from_f32(dtype, &scaled, 1, dtype == FileDType::kF32 ? static_cast<void*>(&stored) : rounded);
      if (dtype != FileDType::kF32) to_f32(dtype, rounded, 1, &stored);
      values[i] = static_cast<float>(static_cast<double>(stored) / tensor->factor);
    }
  }
  params.refresh();
}

// The file that verify_logits.py reads, removed at the end.
struct Reference {
  explicit Reference(const fs::path& folder) : path(folder.string() + ".logits") {}
  ~Reference() {
    std::error_code ignored;
    fs::remove(path, ignored);
  }
  fs::path path;
};

}  // namespace

void check_verify_packages(const HfLayout& layout) {
  if (layout.config.at("model_type") == "stickbreaking_attn") {
    fail(
        ExitCode::kUsage,
        "--verify computes on the CPU, where flash-linear-attention's model does not run; leave it "
        "out, or check the model with --format hf");
  }
  const PythonResult result = run_python(verify_script(), {"packages", kind_of(layout)});
  const std::string output = without_newline(result.output);
  if (result.code == 0 && output.ends_with("found")) return;
  if (result.code == 0) {
    fail(ExitCode::kUsage,
         "--verify: {} does not answer as Python does; SBTRAIN_PYTHON names the interpreter",
         python_interpreter());
  }
  fail(ExitCode::kUsage, "--verify: {} lacks a package:\n{}\n{}", python_interpreter(), output,
       python_advice("torch transformers"));
}

std::string verify_export(const fs::path& folder, const CheckpointReader& checkpoint,
                          const Config& config, const HfLayout& layout, FileDType dtype) {
  const ModelConfig& shape = config.model;
  const int64_t count = std::min(kTokens, layout.length);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    tokens[static_cast<size_t>(i)] =
        static_cast<int32_t>((i * i * 7919 + 17 * i + 3) % shape.vocab);
  }
  const Backend backend = Backend::kCpu;
  InferenceModel model(shape, checkpoint, backend,
                       plan_generation(shape, backend, count, /*max_tokens=*/0));
  round_weights(model.params(), layout, dtype);
  const std::vector<float> logits = model.logits(tokens);

  const Reference reference(folder);
  const Storage storage;
  SafetensorsWriter writer(
      storage, reference.path,
      {{"tokens", FileDType::kI32, {count}}, {"logits", FileDType::kF32, {count, shape.vocab}}},
      {});
  writer.write("tokens", 0, tokens.data(), tokens.size() * sizeof(int32_t));
  writer.write("logits", 0, logits.data(), logits.size() * sizeof(float));
  writer.finish();
  const PythonResult result = run_python(
      verify_script(), {"compare", kind_of(layout), folder.string(), reference.path.string()});
  if (result.code == 0) return without_newline(result.output);
  const ExitCode code = result.code == kMissing ? ExitCode::kUsage : ExitCode::kInternal;
  fail(code, "{}: the export is not what the checkpoint computes:\n{}", folder.string(),
       without_newline(result.output));
}

}  // namespace sbtrain
