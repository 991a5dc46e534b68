#include "export/hf_export.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "checkpoint/workers.h"
#include "core/error.h"
#include "core/version.h"
#include "export/float_format.h"
#include "export/hf_tokenizer.h"
#include "export/model_card.h"
#include "export/python.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

using nlohmann::ordered_json;

constexpr int64_t kChunkElements = kChunkBytes / sizeof(float);  // as checkpoints are verified in

struct ShardPlan {
  std::string file;
  std::vector<const ExportTensor*> tensors;
  uint64_t bytes = 0;
};

uint64_t bytes_of(const ExportTensor& tensor, FileDType dtype) {
  return static_cast<uint64_t>(checked_numel(tensor.shape)) * file_dtype_size(dtype);
}

std::vector<ShardPlan> plan_shards(const HfLayout& layout, FileDType dtype, uint64_t limit) {
  std::vector<ShardPlan> shards;
  for (const ExportTensor& tensor : layout.tensors) {
    const uint64_t bytes = bytes_of(tensor, dtype);
    if (shards.empty() || shards.back().bytes + bytes > limit) shards.emplace_back();
    shards.back().tensors.push_back(&tensor);
    shards.back().bytes += bytes;
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].file = shards.size() == 1
                         ? "model.safetensors"
                         : fmt::format("model-{:05d}-of-{:05d}.safetensors", i + 1, shards.size());
  }
  return shards;
}

void read_tensor(const CheckpointReader& checkpoint, const ExportTensor& tensor, int64_t begin,
                 int64_t end, float* out) {
  read_stored(tensor.layout, begin, end, out,
              [&](int64_t part, int64_t first, int64_t count, float* to) {
                checkpoint.read(kModelKind, tensor.sources.at(static_cast<size_t>(part)), first,
                                first + count, to);
              });
}

// One chunk of a tensor, from element `begin` on.
void write_chunk(SafetensorsWriter& writer, const CheckpointReader& checkpoint,
                 const ExportTensor& tensor, FileDType dtype, int64_t begin) {
  thread_local std::vector<float> values;
  thread_local std::vector<uint8_t> bytes;
  const int64_t end = std::min(begin + kChunkElements, checked_numel(tensor.shape));
  const auto count = static_cast<size_t>(end - begin);
  values.resize(static_cast<size_t>(kChunkElements));
  read_tensor(checkpoint, tensor, begin, end, values.data());
  if (!std::all_of(values.begin(), values.begin() + (end - begin),
                   [](float value) { return std::isfinite(value); })) {
    fail(ExitCode::kDiverged,
         "{}: {} has values that are NaN or infinite, since the run has diverged; name an earlier "
         "checkpoint, which `sbtrain ckpt ls` lists",
         checkpoint.folder().string(), fmt::join(tensor.sources, ", "));
  }
  if (tensor.factor != 1.0) {
    for (size_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(static_cast<double>(values[i]) * tensor.factor);
    }
  }
  bytes.resize(count * file_dtype_size(dtype));
  if (from_f32(dtype, values.data(), count, bytes.data()) > 0) {
    fail(ExitCode::kConfig, "{}: {} has values that {} cannot hold; use --dtype bf16 or f32",
         checkpoint.folder().string(), fmt::join(tensor.sources, ", "), torch_dtype_name(dtype));
  }
  writer.write(tensor.name, static_cast<uint64_t>(begin) * file_dtype_size(dtype), bytes.data(),
               bytes.size());
}

void write_shard(const Storage& storage, const fs::path& folder, const ShardPlan& shard,
                 const CheckpointReader& checkpoint, FileDType dtype) {
  std::vector<SafetensorsEntry> entries;
  std::vector<std::pair<const ExportTensor*, int64_t>> chunks;
  for (const ExportTensor* tensor : shard.tensors) {
    entries.push_back({tensor->name, dtype, tensor->shape});
    for (int64_t begin = 0; begin < checked_numel(tensor->shape); begin += kChunkElements) {
      chunks.emplace_back(tensor, begin);
    }
  }
  SafetensorsWriter writer(storage, folder / shard.file, std::move(entries), {{"format", "pt"}});
  run_parallel(static_cast<int64_t>(chunks.size()), [&](int64_t i) {
    const auto& [tensor, begin] = chunks[static_cast<size_t>(i)];
    write_chunk(writer, checkpoint, *tensor, dtype, begin);
  });
  writer.finish();
}

void write_text(const Storage& storage, const fs::path& path, const std::string& text) {
  OutputFile file = storage.create(path);
  file.write_at(0, text.data(), text.size());
  file.finish();
}

void write_json(const Storage& storage, const fs::path& path, const ordered_json& value) {
  write_text(storage, path, value.dump(2) + "\n");
}

void write_index(const Storage& storage, const fs::path& folder,
                 const std::vector<ShardPlan>& shards) {
  if (shards.size() == 1) return;
  uint64_t total = 0;
  ordered_json map = ordered_json::object();
  for (const ShardPlan& shard : shards) {
    total += shard.bytes;
    for (const ExportTensor* tensor : shard.tensors) map[tensor->name] = shard.file;
  }
  write_json(storage, folder / "model.safetensors.index.json",
             {{"metadata", {{"total_size", total}}}, {"weight_map", map}});
}

// Nothing if the tokenizer is not known.
std::optional<HfTokenizer> read_tokenizer(const HfLayout& layout, const Config& config,
                                          const HfExportOptions& options) {
  if (options.tokenizer.empty()) return std::nullopt;
  return hf_tokenizer(options.tokenizer, {.starts_with_bos = options.starts_with_bos,
                                          .max_length = layout.length,
                                          .vocab = config.model.vocab});
}

void write_configs(const Storage& storage, const fs::path& folder, const HfLayout& layout,
                   const std::optional<HfTokenizer>& tokenizer, const std::string& text_hash) {
  ordered_json config = layout.config;
  ordered_json generation = {{"do_sample", true}, {"temperature", 0.8}, {"top_p", 0.95}};
  const std::string& hash = text_hash.empty() && tokenizer ? tokenizer->hash : text_hash;
  if (!hash.empty()) config["sbtrain"]["tokenizer_hash"] = hash;
  if (tokenizer) {
    for (const auto& [name, text] : tokenizer->texts) write_text(storage, folder / name, text);
    const auto token = [&](const char* key, int32_t id) {
      if (id < 0) return;
      config[key] = id;
      generation[key] = id;
    };
    token("bos_token_id", tokenizer->bos);
    token("eos_token_id", tokenizer->eos);
    // Generation pads finished rows; what they hold is not read.
    token("pad_token_id", tokenizer->eos);
  } else {
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) config[key] = nullptr;
  }
  write_json(storage, folder / "config.json", config);
  write_json(storage, folder / "generation_config.json", generation);
  if (!layout.own_code) return;
  for (const PythonFile& file : model_code()) {
    write_text(storage, folder / std::string(file.name), std::string(file.text));
  }
}

bool is_inside(const fs::path& path, const fs::path& folder) {
  std::error_code unreadable;
  const fs::path inner = fs::weakly_canonical(path, unreadable);
  const fs::path outer = fs::weakly_canonical(folder, unreadable);
  const auto [end, rest] = std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end());
  return end == outer.end();
}

}  // namespace

void check_export_output(const fs::path& output, const fs::path& input) {
  std::error_code unreadable;
  const auto refuse = [&](const std::string& why) {
    fail(ExitCode::kUsage, "--output {}: {}", output.string(), why);
  };
  if (output.empty()) refuse("is empty; name a new folder");
  if (output.filename().empty() && output.has_relative_path()) {  // NAME/; "/" is its own parent
    return check_export_output(output.parent_path(), input);
  }
  if (is_inside(output, input)) refuse("lies in the folder that is read; choose another one");
  // The finished folder is renamed to this name, which neither "." nor a link can become.
  if (output.filename() == "." || output.filename() == "..") {
    refuse("cannot be replaced by the finished folder; name a new one");
  }
  const fs::file_status status = fs::symlink_status(output, unreadable);
  if (fs::exists(status) && (!fs::is_directory(status) || !fs::is_empty(output, unreadable))) {
    refuse("exists and is not an empty folder; choose a new one");
  }
  const fs::path unfinished = output.string() + ".tmp";
  if (fs::exists(fs::symlink_status(unfinished, unreadable))) {
    refuse(fmt::format("{} exists; if a command that was interrupted has left it, remove it",
                       unfinished.string()));
  }
  check_folder_of(output);
}

void export_hf(const CheckpointReader& checkpoint, const Config& config, const HfLayout& layout,
               const HfExportOptions& options) {
  const std::optional<HfTokenizer> tokenizer = read_tokenizer(layout, config, options);
  const Storage storage;
  fs::path output = options.output;
  if (output.filename().empty()) output = output.parent_path();
  const fs::path folder = output.string() + ".tmp";
  const fs::path parent = fs::absolute(output).parent_path();
  storage.make_folders(folder);
  try {
    const std::vector<ShardPlan> shards =
        plan_shards(layout, options.dtype, std::max<uint64_t>(options.shard_bytes, 1));
    for (const ShardPlan& shard : shards) {
      write_shard(storage, folder, shard, checkpoint, options.dtype);
    }
    write_index(storage, folder, shards);
    write_configs(storage, folder, layout, tokenizer, options.tokenizer_hash);
    write_text(storage, folder / "README.md",
               model_card(checkpoint, config, layout, options.average));
    storage.sync_folder(folder);
    if (options.check) options.check(folder);
    storage.rename(folder, output);
    storage.sync_folder(parent);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(folder, ignored);
    throw;
  }
}

}  // namespace sbtrain
