#include "export/hf_folder.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint.h"
#include "checkpoint/layout.h"
#include "checkpoint/strict_json.h"
#include "core/error.h"
#include "core/files.h"
#include "core/hugging_face_name.h"
#include "export/float_format.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {
namespace fs = std::filesystem;
namespace {

using nlohmann::json;

constexpr const char* kConfig = "config.json";
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr size_t kMostBytes = size_t{256} << 20;  // of a JSON file
constexpr int kMaxDepth = 32;

json read_json(const fs::path& path, ExitCode code, const std::string& hint = "") {
  return parse_strict(read_input(path, code, hint, kMostBytes), path.string(), kMaxDepth);
}

// A value that older programs stored with the weights, and that follows from the configuration.
bool is_derived(std::string_view name) {
  return name.ends_with("rotary_emb.inv_freq");
}

// Our name of a tensor of flash-linear-attention's stick-breaking model.
std::string from_fla(std::string name) {
  const auto replace = [&](std::string_view from, std::string_view to) {
    if (const size_t at = name.find(from); at != std::string::npos)
      name.replace(at, from.size(), to);
  };
  replace("model.embeddings.", "model.embed_tokens.");
  replace(".attn_norm.", ".input_layernorm.");
  replace(".mlp_norm.", ".post_attention_layernorm.");
  replace(".attn.", ".self_attn.");
  return name;
}

// That of one of the tensors that a stored one of that shape holds. Where the shape cannot be that
// of several, it stays, so that it is told from that of the model.
std::vector<int64_t> our_shape(std::vector<int64_t> stored, const StoredPlace& place) {
  if (stored.empty() || stored.size() > 2 || (place.transposed && stored.size() != 2)) {
    return stored;
  }
  if (place.transposed) std::swap(stored[0], stored[1]);
  if (stored[0] % place.parts == 0) stored[0] /= place.parts;
  return stored;
}

// The index names files of its own folder, and nothing else.
bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

std::map<std::string, std::string> read_index(const fs::path& path) {
  const json index = read_json(path, ExitCode::kNoCheckpoint);
  const auto refuse = [&](const std::string& why) {
    fail(ExitCode::kNoCheckpoint, "{}: {}", path.string(), why);
  };
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    refuse("it has no weight_map");
  }
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    if (!file.is_string() || !is_plain_file_name(file.get<std::string>())) {
      refuse(fmt::format("the file of {} is {}, which is not the name of a file in this folder",
                         name, file.dump(-1, ' ', false, json::error_handler_t::replace)));
    }
    files[name] = file.get<std::string>();
  }
  if (files.empty()) refuse("its weight_map is empty");
  return files;
}

std::string stored_tokenizer_hash(const json& hf, const fs::path& path) {
  if (!hf.contains("sbtrain") || !hf["sbtrain"].is_object()) return "";
  const json& section = hf["sbtrain"];
  const auto hash = section.find("tokenizer_hash");
  if (hash == section.end()) return "";
  if (!hash->is_string()) {
    fail(ExitCode::kConfig, "{}: sbtrain.tokenizer_hash is not a text", path.string());
  }
  return hash->get<std::string>();
}

}  // namespace

HfFolder::HfFolder(fs::path folder) : folder_(std::move(folder)) {
  const fs::path path = folder_ / kConfig;
  json hf;
  try {
    hf = read_json(path, ExitCode::kConfig, hugging_face_hint(folder_));
  } catch (const Error& error) {
    throw Error(ExitCode::kConfig, error.what());
  }
  if (hf.is_object() && hf.contains("model_type") && hf["model_type"].is_string()) {
    model_type_ = hf["model_type"].get<std::string>();
  }
  if (hf.is_object()) tokenizer_hash_ = stored_tokenizer_hash(hf, path);
  open_files();
  config_ = config_from_hf(hf, /*tied=*/!has_head_, path.string());
  // Every layer has tensors; a model is built from the configuration only where they can be there.
  if (config_.model.layers > static_cast<int64_t>(tensors_.size())) {
    fail(ExitCode::kConfig, "{}: {} layers, but the folder has {} tensors", path.string(),
         config_.model.layers, tensors_.size());
  }
  if (config_.model.tied) {
    check_head_is_tied();
    tensors_.erase(kHead);  // a copy of the embedding's table
  }
  architecture_ = model_type_;
  if (hf.contains("architectures") && hf["architectures"].is_array() &&
      !hf["architectures"].empty() && hf["architectures"][0].is_string()) {
    architecture_ = hf["architectures"][0].get<std::string>();
  }
}

void HfFolder::open_files() {
  if (is_there(folder_ / kIndex)) {
    const std::map<std::string, std::string> index = read_index(folder_ / kIndex);
    std::vector<std::string> files;
    for (const auto& [name, file] : index) files.push_back(file);
    std::ranges::sort(files);
    files.erase(std::unique(files.begin(), files.end()), files.end());
    for (const std::string& file : files) open_file(file, &index);
    for (const auto& [name, file] : index) {
      const bool found = std::ranges::any_of(
          files_, [&, name = name](const SafetensorsReader& reader) { return reader.has(name); });
      if (!found) {
        fail(ExitCode::kNoCheckpoint, "{}: {} does not hold {}", (folder_ / kIndex).string(), file,
             name);
      }
    }
    return;
  }
  if (!is_there(folder_ / kSingle)) {
    fail(ExitCode::kNoCheckpoint,
         "{}: there is neither {} nor {}; weights in other formats can be converted by "
         "transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
         folder_.string(), kSingle, kIndex);
  }
  open_file(kSingle, nullptr);
}

void HfFolder::open_file(const std::string& file, const std::map<std::string, std::string>* index) {
  const size_t number = files_.size();
  const SafetensorsReader& reader = files_.emplace_back(folder_ / file);
  for (const SafetensorsEntry& entry : reader.entries()) {
    if (index != nullptr) {
      const auto listed = index->find(entry.name);
      if (listed == index->end() || listed->second != file) {
        fail(ExitCode::kNoCheckpoint, "{}: {} is here, but {} {}", (folder_ / file).string(),
             entry.name, kIndex,
             listed == index->end() ? "does not list it" : "places it in " + listed->second);
      }
    }
    add(number, entry);
  }
}

void HfFolder::add(size_t file, const SafetensorsEntry& entry) {
  if (is_derived(entry.name) || is_stored_mask(model_type_, entry.name)) return;
  if (!is_weight_type(entry.dtype)) {
    fail(ExitCode::kNoCheckpoint, "{}: {} is of type {}; weights are read as F32, BF16 or F16",
         files_[file].path().string(), entry.name, file_dtype_name(entry.dtype));
  }
  const std::string renamed =
      model_type_ == "stickbreaking_attn" ? from_fla(entry.name) : entry.name;
  for (const OurTensor& ours : our_tensors(model_type_, renamed)) {
    if (ours.name == kHead) has_head_ = true;
    Stored stored{file, &entry, ours.place, our_shape(entry.shape, ours.place)};
    if (!tensors_.emplace(ours.name, std::move(stored)).second) {
      fail(ExitCode::kNoCheckpoint, "{}: {} is there twice", folder_.string(), ours.name);
    }
  }
}

// Programs differ in which of two tables they take, so that only equal ones have a meaning.
void HfFolder::check_head_is_tied() const {
  if (!has_head_ || !has(kEmbedding)) return;
  constexpr int64_t kPart = int64_t{1} << 20;
  bool same = shape(kHead) == shape(kEmbedding);
  const int64_t count = same ? checked_numel(shape(kHead)) : 0;
  std::vector<float> head(static_cast<size_t>(std::min(count, kPart)));
  std::vector<float> embedding(head.size());
  for (int64_t begin = 0; begin < count && same; begin += kPart) {
    const int64_t end = std::min(count, begin + kPart);
    read(kHead, begin, end, head.data());
    read(kEmbedding, begin, end, embedding.data());
    same = std::memcmp(head.data(), embedding.data(),
                       static_cast<size_t>(end - begin) * sizeof(float)) == 0;
  }
  if (same) return;
  fail(ExitCode::kConfig,
       "{}: the model is tied (tie_word_embeddings), but {} is there and differs from {}: say "
       "\"tie_word_embeddings\": false if the head is its own, or take it out of the weights",
       (folder_ / kConfig).string(), kHead, kEmbedding);
}

std::vector<std::string> HfFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, stored] : tensors_) names.push_back(name);
  return names;
}

const HfFolder::Stored& HfFolder::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    fail(ExitCode::kNoCheckpoint, "{}: no tensor {}", folder_.string(), name);
  }
  return found->second;
}

const std::vector<int64_t>& HfFolder::shape(std::string_view name) const {
  return at(name).shape;
}

void HfFolder::read(std::string_view name, int64_t begin, int64_t end, float* out) const {
  const Stored& stored = at(name);
  if (stored.place.parts == 1 && !stored.place.transposed) {
    return read_entry(stored, begin, end, out);
  }
  const PartsLayout layout = parts_layout(stored.place, stored.shape, config_.model.head_width());
  read_part(layout, stored.place.part, begin, end, out,
            [&](int64_t first, int64_t count, float* to) {
              read_entry(stored, first, first + count, to);
            });
}

// Elements [begin, end) as they are stored.
void HfFolder::read_entry(const Stored& stored, int64_t begin, int64_t end, float* out) const {
  const FileDType type = stored.entry->dtype;
  const size_t size = file_dtype_size(type);
  const auto count = static_cast<size_t>(end - begin);
  thread_local std::vector<uint8_t> bytes;
  void* to = out;
  if (type != FileDType::kF32) {
    bytes.resize(count * size);
    to = bytes.data();
  }
  files_[stored.file].read(*stored.entry, static_cast<uint64_t>(begin) * size, to, count * size);
  if (type != FileDType::kF32) to_f32(type, bytes.data(), count, out);
}

fs::path HfFolder::tokenizer() const {
  const std::vector<std::string> files = find_tokenizers(folder_.string());
  if (files.empty() || tokenizer_hash_.empty()) return files.empty() ? "" : files.front();
  for (const std::string& file : files) {
    if (tokenizer_fingerprint(file) == tokenizer_hash_) return file;
  }
  fail(ExitCode::kConfig,
       "{} (sha256 {:.12}) is not the tokenizer of the text that the model was trained on ({:.12}, "
       "sbtrain.tokenizer_hash in {}); if it gives the same tokens, as one that was only written "
       "anew does, take tokenizer_hash out of {}",
       files.front(), tokenizer_fingerprint(files.front()), tokenizer_hash_,
       (folder_ / kConfig).string(), kConfig);
}

bool is_hf_folder(const fs::path& path) {
  return is_there(path / kConfig) && !is_checkpoint_folder(path) && !is_there(checkpoints_of(path));
}

}  // namespace sbtrain
