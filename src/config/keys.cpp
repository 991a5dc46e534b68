#include "config/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "config/fields.h"
#include "config/values.h"

namespace sbtrain::schema {
namespace {

class Collector : public Fields {
 public:
  using Fields::list;
  using Fields::section;

  void value(std::string_view key, const Member& member, const Rule& rule,
             std::string_view help) override {
    const bool texts = std::holds_alternative<std::vector<std::string>*>(member);
    Key& info = add_key(key, texts ? Key::Kind::kTexts : Key::Kind::kScalar, rule, help);
    info.type = rule.choices.empty() ? type_names(member).short_name : "choice";
    info.default_value = to_text(member);
  }

  void section(std::string_view key, const Describe& describe, std::string_view help) override {
    add_key(key, Key::Kind::kSection, Rule{}, help).type = "section";
    visit(std::string(key), describe);
  }

  void list(std::string_view key, ListMember& items, const Rule& rule,
            std::string_view help) override {
    Key& info = add_key(key, Key::Kind::kList, rule, help);
    info.type = rule.single ? "section, or list of sections" : "list of sections";
    visit(fmt::format("{}.*", key), [&](Fields& f) { items.describe_default(f); });
  }

  bool lists_alternatives() const override { return true; }

  std::vector<Key> take() { return std::move(keys_); }

 private:
  Key& add_key(std::string_view key, Key::Kind kind, const Rule& rule, std::string_view help) {
    Key info;
    info.path = prefix_ + std::string(key);
    info.kind = kind;
    info.range = rule.range();
    info.condition = rule.condition();
    info.help = help;
    info.choices.assign(rule.choices.begin(), rule.choices.end());
    info.required = rule.required;
    info.single = rule.single;
    keys_.push_back(std::move(info));
    return keys_.back();
  }

  void visit(const std::string& key, const Describe& describe) {
    const std::string outer = prefix_;
    prefix_ += key + ".";
    describe(*this);
    prefix_ = outer;
  }

  std::string prefix_;
  std::vector<Key> keys_;
};

// Whether segments [at...] of a path name the rest of `key`.
bool matches(const std::vector<std::string>& path, size_t at, const std::vector<std::string>& key,
             size_t key_at) {
  if (key_at == key.size()) return at == path.size();
  if (key[key_at] != "*") {
    return at < path.size() && path[at] == key[key_at] && matches(path, at + 1, key, key_at + 1);
  }
  if (at < path.size() && (path[at] == "*" || is_index(path[at]))) {
    return matches(path, at + 1, key, key_at + 1);
  }
  return false;
}

// Names that other trainers (transformers, nanoGPT, torchtitan, Megatron-LM, litgpt) have for keys
// of ours, from which they differ too much to be taken for misspellings.
struct Synonym {
  std::string_view key;
  std::vector<std::string_view> names;
};

const std::vector<Synonym>& synonyms() {
  static const std::vector<Synonym> kSynonyms = {
      {"name", {"run_name", "experiment_name"}},
      {"out", {"output_dir", "out_dir", "save_dir", "run_dir", "checkpoint_dir"}},
      {"model.layers",
       {"n_layer", "n_layers", "num_layers", "num_hidden_layers", "num_blocks", "depth"}},
      {"model.width",
       {"n_embd", "d_model", "dim", "hidden_size", "hidden_dim", "embed_dim", "embedding_dim"}},
      {"model.inner", {"intermediate_size", "ffn_hidden_size", "ffn_dim", "d_ff", "n_inner"}},
      {"model.heads", {"n_head", "n_heads", "num_heads", "num_attention_heads"}},
      {"model.kv_heads",
       {"n_kv_head", "n_kv_heads", "num_kv_heads", "num_key_value_heads", "num_query_groups"}},
      {"model.vocab", {"vocab_size", "padded_vocab_size", "n_vocab"}},
      {"model.tied", {"tie_word_embeddings", "tie_embeddings", "weight_tying"}},
      {"model.norm_eps", {"rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"}},
      {"model.mlp", {"hidden_act", "activation_function", "activation"}},
      {"model.parallel_residual", {"use_parallel_residual", "parallel_attn"}},
      {"model.init_std", {"initializer_range", "init_method_std"}},
      {"model.attention.rope_base", {"rope_theta", "rotary_base"}},
      {"model.attention.rope_fraction", {"rotary_pct", "partial_rotary_factor", "rotary_percent"}},
      {"model.attention.window", {"sliding_window", "window_size"}},
      {"train.sequence_length",
       {"seq_len", "seq_length", "max_seq_len", "max_seq_length", "block_size", "context_length",
        "context_size", "ctx_len", "max_length", "n_ctx", "n_positions",
        "max_position_embeddings"}},
      {"train.micro_batch",
       {"micro_batch_size", "per_device_train_batch_size", "device_batch_size"}},
      {"train.batch",
       {"batch_size", "global_batch_size", "train_batch_size", "gradient_accumulation_steps"}},
      {"train.lr", {"learning_rate", "max_lr", "peak_lr", "base_lr"}},
      {"train.beta1", {"adam_beta1"}},
      {"train.beta2", {"adam_beta2"}},
      {"train.eps", {"adam_epsilon", "adam_eps"}},
      {"train.weight_decay", {"wd"}},
      {"train.clip",
       {"grad_clip", "max_grad_norm", "max_norm", "gradient_clipping", "clip_grad_norm",
        "gradient_clip_val"}},
      {"train.recompute", {"gradient_checkpointing", "activation_checkpointing", "remat"}},
      {"train.offload", {"activation_offloading", "cpu_offload", "offload_activations"}},
      {"data.sources.*.path",
       {"dataset", "dataset_path", "data_path", "train_data", "train_file", "train_files"}},
      {"data.validation",
       {"val_data", "valid_data", "eval_data", "validation_file", "validation_data"}},
      {"data.tokenizer", {"tokenizer_path", "tokenizer_name", "tokenizer_model"}},
      {"stages.*.length",
       {"max_steps", "num_steps", "total_steps", "train_steps", "max_iters", "train_iters",
        "max_tokens", "num_epochs", "num_train_epochs", "epochs"}},
      {"stages.*.schedule.type", {"lr_scheduler", "lr_scheduler_type", "lr_decay_style"}},
      {"stages.*.schedule.warmup",
       {"warmup_steps", "warmup_iters", "num_warmup_steps", "warmup_ratio", "lr_warmup_iters"}},
      {"stages.*.schedule.final_ratio", {"min_lr", "min_lr_ratio", "min_learning_rate"}},
      {"validation.every", {"eval_interval", "eval_steps", "eval_every", "val_check_interval"}},
      {"validation.tokens", {"eval_iters", "eval_tokens"}},
      {"checkpoint.every", {"save_steps", "save_interval", "save_every", "checkpoint_interval"}},
      {"checkpoint.keep", {"save_total_limit", "keep_last"}},
      {"metrics.every", {"log_interval", "logging_steps", "log_every", "log_freq"}}};
  return kSynonyms;
}

// `word` as keys have it, where an option has dashes.
std::string with_underscores(std::string_view word) {
  std::string result(word);
  std::ranges::replace(result, '-', '_');
  return result;
}

// The key that `word` means in other trainers; empty if it means none there.
std::string key_of_others(std::string_view name) {
  const std::string word = with_underscores(name);
  for (const Synonym& synonym : synonyms()) {
    if (std::ranges::count(synonym.names, word) > 0) return std::string(synonym.key);
  }
  return "";
}

// The path among `paths`, all of one section, whose last segment is nearest to `word`.
std::string nearest_last_segment(const std::string& word, const std::vector<std::string>& paths) {
  std::vector<std::string> words;
  words.reserve(paths.size());
  for (const std::string& path : paths) words.push_back(path.substr(path.rfind('.') + 1));
  const std::string found = nearest(word, words);
  if (found.empty()) return "";
  return paths[static_cast<size_t>(std::ranges::find(words, found) - words.begin())];
}

// `path` with its "*" replaced by the indices among `segments`, or 0.
std::string with_indices(const std::string& path, const std::vector<std::string>& segments) {
  std::vector<std::string> indices;
  std::ranges::copy_if(segments, std::back_inserter(indices), is_index);
  std::string result;
  size_t next = 0;
  for (const std::string& segment : split_path(path)) {
    if (!result.empty()) result += '.';
    if (segment != "*") {
      result += segment;
    } else {
      result += next < indices.size() ? indices[next] : "0";
      ++next;
    }
  }
  return result;
}

}  // namespace

const std::vector<Key>& all_keys() {
  static const std::vector<Key> keys = [] {
    Collector collector;
    Config config;
    describe(collector, config);
    return collector.take();
  }();
  return keys;
}

std::vector<std::string> split_path(std::string_view path) {
  std::vector<std::string> segments;
  for (size_t start = 0; start <= path.size();) {
    const size_t dot = std::min(path.find('.', start), path.size());
    segments.emplace_back(path.substr(start, dot - start));
    start = dot + 1;
  }
  return segments;
}

bool is_index(std::string_view segment) {
  return !segment.empty() && segment.size() <= 6 &&
         std::ranges::all_of(segment, [](char c) { return c >= '0' && c <= '9'; });
}

std::string short_path(const std::string& path) {
  std::string result = path;
  for (const Key& key : all_keys()) {
    if (key.single && path.starts_with(key.path + ".*.")) {
      result = key.path + path.substr(key.path.size() + 2);
    }
  }
  return result;
}

const Key* find_key(std::string_view path) {
  const std::vector<std::string> segments = split_path(path);
  for (const Key& key : all_keys()) {
    if (matches(segments, 0, split_path(key.path), 0)) return &key;
    if (key.kind == Key::Kind::kTexts && matches(segments, 0, split_path(key.path + ".*"), 0)) {
      return &key;
    }
    const std::string shorter = short_path(key.path);
    if (shorter != key.path && matches(segments, 0, split_path(shorter), 0)) return &key;
  }
  return nullptr;
}

const Key* find_key_ending(std::string_view word) {
  const std::string name = with_underscores(word);
  const auto ends = [&](const Key& key) { return split_path(key.path).back() == name; };
  const auto found = std::ranges::find_if(all_keys(), ends);
  if (found != all_keys().end()) return &*found;
  const std::string key = key_of_others(word);
  return key.empty() ? nullptr : find_key(key);
}

std::string did_you_mean(std::string_view path) {
  const std::vector<std::string> segments = split_path(path);
  std::string pattern;  // indices become "*", so that they make no difference
  for (const std::string& segment : segments) {
    pattern += (pattern.empty() ? "" : ".") + (is_index(segment) ? "*" : segment);
  }
  const std::string& word = segments.back();
  const std::string parent = pattern.substr(0, pattern.rfind('.') + 1);
  std::vector<std::string> siblings;  // in the same section
  std::vector<std::string> cousins;   // the same word in another section
  std::vector<std::string> all;
  for (const Key& key : all_keys()) {
    for (const std::string& name : {key.path, short_path(key.path)}) {
      const size_t last = name.rfind('.') + 1;
      if (name.substr(0, last) == parent) siblings.push_back(name);
      if (name.substr(last) == word) cousins.push_back(name);
      all.push_back(name);
    }
  }
  std::string found = cousins.empty() ? key_of_others(word) : "";
  if (found.empty()) found = nearest_last_segment(word, siblings);
  if (found.empty()) found = nearest(pattern, cousins);
  if (found.empty() && !cousins.empty()) found = cousins.front();
  if (found.empty()) found = nearest(pattern, all);
  return found.empty() ? "" : fmt::format("; did you mean '{}'?", with_indices(found, segments));
}

}  // namespace sbtrain::schema
