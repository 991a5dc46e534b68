// A Hugging Face folder as it is read: its configuration in our terms, and its weights by our
// names.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"
#include "checkpoint/weight_source.h"
#include "export/hf_tensors.h"
#include "train/run_config.h"

namespace sbtrain {

class HfFolder : public WeightSource {
 public:
  // Reads config.json and the headers of all weights files, and checks that they fit each other.
  // Takes LlamaForCausalLM, GraniteForCausalLM, MistralForCausalLM, SmolLM3ForCausalLM,
  // Qwen2ForCausalLM, Qwen3ForCausalLM, Olmo2ForCausalLM, GPTNeoXForCausalLM, GPT2LMHeadModel,
  // SbtrainForCausalLM and StickBreakingAttentionForCausalLM.
  // Throws ExitCode::kConfig, naming the key, for a configuration that this program has no model
  // for, and ExitCode::kNoCheckpoint for files that are missing or damaged.
  explicit HfFolder(std::filesystem::path folder);

  // A whole configuration around the folder's model section. Training data and schedule are
  // placeholders.
  const Config& config() const { return config_; }
  const std::string& architecture() const { return architecture_; }
  // The fingerprint of the tokenizer that the weights belong to, as an export of this program says
  // it; empty: not known.
  const std::string& tokenizer_hash() const { return tokenizer_hash_; }
  // The tokenizer's model file; empty if there is none. Throws ExitCode::kConfig if tokenizer_hash
  // is that of another one.
  std::filesystem::path tokenizer() const;

  std::string name() const override { return folder_.string(); }
  std::vector<std::string> names() const override;
  bool has(std::string_view name) const override { return tensors_.find(name) != tensors_.end(); }
  const std::vector<int64_t>& shape(std::string_view name) const override;
  void read(std::string_view name, int64_t begin, int64_t end, float* out) const override;

 private:
  struct Stored {
    size_t file = 0;
    const SafetensorsEntry* entry = nullptr;
    StoredPlace place;           // in the entry
    std::vector<int64_t> shape;  // of our tensor
  };
  void open_files();
  void open_file(const std::string& file, const std::map<std::string, std::string>* index);
  void add(size_t file, const SafetensorsEntry& entry);
  void read_entry(const Stored& stored, int64_t begin, int64_t end, float* out) const;
  void check_head_is_tied() const;
  const Stored& at(std::string_view name) const;

  std::filesystem::path folder_;
  Config config_;
  std::string architecture_;
  std::string model_type_;
  std::string tokenizer_hash_;
  std::deque<SafetensorsReader> files_;
  bool has_head_ = false;                               // lm_head.weight is stored
  std::map<std::string, Stored, std::less<>> tensors_;  // by our names
};

// Whether `path` is a folder with a config.json, and no checkpoint or run.
bool is_hf_folder(const std::filesystem::path& path);

// The configuration that config.json means. `tied`: what holds if it does not say whether the head
// shares the embedding's table. `name` is how messages call the file.
Config config_from_hf(const nlohmann::json& hf, bool tied, const std::string& name);

}  // namespace sbtrain
