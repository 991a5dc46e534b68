// From config.json to our configuration.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "config/schema.h"
#include "core/error.h"
#include "export/hf_folder.h"

namespace sbtrain {
namespace {

using nlohmann::json;

// Training sequences of an imported model, which also are the windows of `sbtrain eval`, are at
// most so long: many models claim more than a machine can hold at once.
constexpr int64_t kLongestSequence = 4096;

// No model claims more; beyond, a number is a mistake of whoever wrote it.
constexpr int64_t kMostPositions = int64_t{1} << 24;

class HfConfig {
 public:
  HfConfig(const json& hf, bool tied, const std::string& name) : hf_(hf), name_(name), tied_(tied) {
    if (!hf.is_object()) refuse("it is not an object");
    type_ = text("model_type", "");
    if (has("quantization_config")) {
      refuse(
          "quantization_config: weights that are stored, or to be computed with, in a quantised "
          "form "
          "are not read; take the model's original weights");
    }
  }

  json section() const {
    if (type_ == "sbtrain") return own();
    if (type_ == "stickbreaking_attn") return stickbreaking();
    if (type_ == "gpt2") return gpt2();
    if (type_ == "gpt_neox") return gpt_neox();
    static constexpr std::string_view kKnown[] = {"llama", "granite", "mistral", "smollm3",
                                                  "qwen2", "qwen3",   "olmo2"};
    if (std::ranges::count(kKnown, type_) == 0) {
      refuse(
          fmt::format("there is no model for model_type '{}'; {} can be read, and gpt2, gpt_neox, "
                      "stickbreaking_attn and sbtrain",
                      type_, fmt::join(kKnown, ", ")));
    }
    return softmax();
  }

  int64_t length() const {
    const char* key = type_ == "gpt2" ? "n_positions" : "max_position_embeddings";
    return std::min(has(key) ? positions(hf_, key) : kLongestSequence, kLongestSequence);
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    fail(ExitCode::kConfig, "{}: {}", name_, why);
  }
  static bool has(const json& from, const char* key) {
    return from.contains(key) && !from.at(key).is_null();
  }
  bool has(const char* key) const { return has(hf_, key); }
  const json& need(const char* key) const {
    if (!has(key)) refuse(fmt::format("{} is missing", key));
    return hf_.at(key);
  }
  int64_t whole(const char* key) const {
    need(key);
    return whole(hf_, key);
  }
  int64_t whole(const json& from, const char* key) const {
    const json& value = from.at(key);
    const bool small = !value.is_number_unsigned() || value.get<uint64_t>() <= INT64_MAX;
    if (!value.is_number_integer() || !small) {
      refuse(fmt::format("{} is {}, not a whole number that fits 64 bits", key, value.dump()));
    }
    return value.get<int64_t>();
  }
  // A number of positions.
  int64_t positions(const json& from, const char* key) const {
    if (&from == &hf_) need(key);
    const int64_t count = whole(from, key);
    if (count < 1 || count > kMostPositions) {
      refuse(fmt::format("{} is {}, not from 1 to {}", key, count, kMostPositions));
    }
    return count;
  }
  double number(const json& from, const char* key, double otherwise) const {
    if (!from.contains(key) || from.at(key).is_null()) return otherwise;
    const json& value = from.at(key);
    if (!value.is_number() || !std::isfinite(value.get<double>())) {
      refuse(fmt::format("{} is {}, not a finite number", key, value.dump()));
    }
    return value.get<double>();
  }
  bool flag(const char* key, bool otherwise = false) const {
    if (!has(key)) return otherwise;
    if (!hf_.at(key).is_boolean()) {
      refuse(fmt::format("{} is {}, not true or false", key, hf_.at(key).dump()));
    }
    return hf_.at(key).get<bool>();
  }
  std::string text(const char* key, const char* otherwise) const {
    return text(hf_, key, otherwise);
  }
  std::string text(const json& from, const char* key, const char* otherwise) const {
    if (!from.contains(key) || from.at(key).is_null()) return otherwise;
    if (!from.at(key).is_string()) {
      refuse(fmt::format("{} is {}, not a text", key, from.at(key).dump()));
    }
    return from.at(key).get<std::string>();
  }

  // What all layouts have in common.
  json base(const char* heads_key, const char* kv_key, const char* eps_key) const {
    const int64_t heads = whole(heads_key);
    json section = {{"layers", whole("num_hidden_layers")},
                    {"width", whole("hidden_size")},
                    {"inner", whole("intermediate_size")},
                    {"heads", heads},
                    {"vocab", whole("vocab_size")},
                    {"tied", flag("tie_word_embeddings", tied_)},
                    {"norm", "rmsnorm"},
                    {"norm_eps", epsilon(eps_key, type_ == "olmo2" ? 1e-5 : 1e-6)},
                    {"mlp", "swiglu"},
                    {"init_std", number(hf_, "initializer_range", 0.02)}};
    if (has(kv_key) && whole(kv_key) != heads) section["kv_heads"] = whole(kv_key);
    const std::string activation = text("hidden_act", "silu");
    if (activation != "silu" && activation != "swish") {
      refuse(fmt::format("hidden_act '{}': only silu can be read", activation));
    }
    if (flag("mlp_bias")) refuse("mlp_bias: the MLP has no biases here");
    if (const int64_t d = head_dim(); d != 0) {
      const bool usual =
          heads > 0 && whole("hidden_size") % heads == 0 && whole("hidden_size") / heads == d;
      if (!usual) section["head_dim"] = d;
    }
    return section;
  }

  // What GPT-2 and GPT-NeoX have in common.
  json gpt(const char* activation_key, const char* activation, const char* eps_key) const {
    return {{"norm", "layernorm"},
            {"norm_eps", epsilon(eps_key, 1e-5)},
            {"mlp", gelu(activation_key, activation)},
            {"init_std", number(hf_, "initializer_range", 0.02)},
            {"vocab", whole("vocab_size")},
            {"tied", flag("tie_word_embeddings", type_ == "gpt2")}};
  }

  // The names that transformers has for GELU, of which the last three compute the same.
  std::string gelu(const char* key, const char* otherwise) const {
    const std::string activation = text(key, otherwise);
    if (activation == "gelu" || activation == "gelu_python") return "gelu";
    if (activation == "gelu_new" || activation == "gelu_pytorch_tanh" ||
        activation == "gelu_fast") {
      return "gelu_tanh";
    }
    refuse(fmt::format("{} '{}': gelu, gelu_new, gelu_pytorch_tanh and gelu_fast can be read", key,
                       activation));
  }

  json gpt2() const {
    json section = gpt("activation_function", "gelu_new", "layer_norm_epsilon");
    const int64_t width = whole("n_embd");
    section["layers"] = whole("n_layer");
    section["heads"] = whole("n_head");
    section["width"] = width;
    if (width > INT64_MAX / 4) refuse(fmt::format("n_embd is {}", width));
    section["inner"] = has("n_inner") ? whole("n_inner") : 4 * width;
    section["position"] = "learned";
    section["max_positions"] = positions(hf_, "n_positions");
    if (flag("scale_attn_by_inverse_layer_idx")) {
      refuse("scale_attn_by_inverse_layer_idx: the layers' logits of attention have one scale");
    }
    if (flag("add_cross_attention")) refuse("add_cross_attention: there is no encoder here");
    json attention = {
        {"type", "softmax"}, {"position", "none"}, {"qkv_bias", true}, {"output_bias", true}};
    if (!flag("scale_attn_weights", true)) attention["logit_scale"] = 1;
    section["attention"] = attention;
    return section;
  }

  json gpt_neox() const {
    json section = gpt("hidden_act", "gelu", "layer_norm_eps");
    for (const auto& [ours, theirs] : {std::pair{"layers", "num_hidden_layers"},
                                       {"heads", "num_attention_heads"},
                                       {"width", "hidden_size"},
                                       {"inner", "intermediate_size"}}) {
      section[ours] = whole(theirs);
    }
    section["parallel_residual"] = flag("use_parallel_residual", true);
    json attention = {{"type", "softmax"}, {"position", "rope"}};
    add_rope(attention);
    for (const char* key : {"qkv_bias", "output_bias"})
      attention[key] = flag("attention_bias", true);
    section["attention"] = attention;
    return section;
  }

  double epsilon(const char* key, double otherwise) const {
    const double eps = number(hf_, key, otherwise);
    if (eps <= 0 || eps >= 1) refuse(fmt::format("{} is {}, not above 0 and below 1", key, eps));
    return eps;
  }

  // 0: hidden_size / heads. Qwen3Config of transformers has a default of its own.
  int64_t head_dim() const {
    if (type_ == "stickbreaking_attn") return 0;
    if (!has("head_dim")) return type_ == "qwen3" ? 128 : 0;
    const int64_t d = whole("head_dim");
    if (d < 1) refuse(fmt::format("head_dim is {}", d));
    return d;
  }

  json own() const {
    json section = need("sbtrain");
    if (!section.is_object()) refuse("sbtrain is not an object");
    section.erase("tokenizer_hash");  // HfFolder reads it
    return section;
  }

  json stickbreaking() const {
    json section = base("num_heads", "num_kv_heads", "norm_eps");
    json attention = {{"type", "stickbreaking"}};
    for (const char* key : {"qkv_bias", "qk_norm", "attend_current"}) {
      if (flag(key)) attention[key] = true;
    }
    if (has("window_size")) refuse("window_size: stick-breaking attention has no window here");
    section["attention"] = attention;
    return section;
  }

  json softmax() const {
    json section = base("num_attention_heads", "num_key_value_heads", "rms_norm_eps");
    json attention = {{"type", "softmax"}, {"position", "rope"}};
    add_rope(attention);
    const bool window = has("sliding_window") && (type_ == "mistral" || flag("use_sliding_window"));
    if (window && type_ != "mistral") {
      refuse("use_sliding_window: windows in some of the layers cannot be read");
    }
    if (window) attention["window"] = whole("sliding_window");
    const bool all_biases = flag("attention_bias");
    if (all_biases) attention["output_bias"] = true;
    if (all_biases || type_ == "qwen2") attention["qkv_bias"] = true;
    if (type_ == "qwen3" || type_ == "olmo2") attention["qk_norm"] = true;
    if (type_ == "olmo2") {
      attention["qk_norm_scope"] = "joint";
      section["norm_position"] = "output";
    }
    if (type_ == "granite") {
      section["embedding_multiplier"] = number(hf_, "embedding_multiplier", 1);
      section["residual_multiplier"] = number(hf_, "residual_multiplier", 1);
      section["logits_multiplier"] = 1.0 / number(hf_, "logits_scaling", 1);
      attention["logit_scale"] = number(hf_, "attention_multiplier", 1);
    }
    section["attention"] = type_ == "smollm3" ? some_rope(attention) : attention;
    return section;
  }

  // Where both are given, transformers takes rope_scaling, which older versions know alone, unless
  // it is empty.
  void add_rope(json& attention) const {
    const bool older = has("rope_scaling") && !hf_.at("rope_scaling").empty();
    const char* key = older ? "rope_scaling" : "rope_parameters";
    const json rope = has(key) ? hf_.at(key) : json::object();
    if (!rope.is_object()) refuse(fmt::format("{} is not an object", key));
    const bool neox = type_ == "gpt_neox";
    const double base = number(rope, "rope_theta",
                               number(hf_, neox ? "rotary_emb_base" : "rope_theta",
                                      type_ == "smollm3" ? 2000000.0 : 10000.0));
    attention["rope_base"] = base;
    if (neox) {
      const double fraction =
          number(rope, "partial_rotary_factor", number(hf_, "rotary_pct", 0.25));
      if (fraction <= 0 || fraction > 1) {
        refuse(fmt::format("rotary_pct is {}, not above 0 and at most 1", fraction));
      }
      attention["rope_fraction"] = fraction;
    } else {
      for (const json* at : {&rope, &hf_}) {
        if (number(*at, "partial_rotary_factor", 1.0) != 1.0) {
          refuse(fmt::format("partial_rotary_factor: heads of {} are rotated whole", type_));
        }
      }
    }
    const std::string kind = text(rope, "rope_type", text(rope, "type", "default").c_str());
    if (kind == "default") return;
    static constexpr std::string_view kKnown[] = {"linear", "dynamic", "yarn", "llama3"};
    if (std::ranges::count(kKnown, kind) == 0) {
      refuse(
          fmt::format("{}: rotary positions of the type '{}' cannot be computed; default, {} can",
                      key, kind, fmt::join(kKnown, ", ")));
    }
    attention["rope_scaling"] = kind == "dynamic" ? "dynamic_ntk" : kind;
    attention["rope_factor"] = required(rope, key, "factor");
    if (kind == "dynamic")
      attention["rope_train_length"] = positions(hf_, "max_position_embeddings");
    if (kind == "yarn") add_yarn(attention, rope, key);
    if (kind == "llama3") add_llama3(attention, rope, key);
  }

  double required(const json& rope, const char* section, const char* key) const {
    if (!has(rope, key)) refuse(fmt::format("{}: {} is missing", section, key));
    return number(rope, key, 0.0);
  }

  // transformers takes the number beside rope_parameters first, then the one inside, then the
  // longest text of the model.
  int64_t trained_length(const json& rope) const {
    const char* key = "original_max_position_embeddings";
    if (has(key)) return positions(hf_, key);
    return has(rope, key) ? positions(rope, key) : positions(hf_, "max_position_embeddings");
  }

  void add_llama3(json& attention, const json& rope, const char* section) const {
    attention["rope_factor"] = required(rope, section, "factor");
    attention["rope_train_length"] = trained_length(rope);
    attention["rope_low_freq_factor"] = required(rope, section, "low_freq_factor");
    attention["rope_high_freq_factor"] = required(rope, section, "high_freq_factor");
  }

  void add_yarn(json& attention, const json& rope, const char* section) const {
    const double factor = required(rope, section, "factor");
    attention["rope_factor"] = factor;
    attention["rope_train_length"] = trained_length(rope);
    // transformers takes a zero for a missing number.
    const auto given = [&](const char* key, double otherwise) {
      const double value = number(rope, key, otherwise);
      return value != 0 ? value : otherwise;
    };
    attention["rope_beta_fast"] = given("beta_fast", 32.0);
    attention["rope_beta_slow"] = given("beta_slow", 1.0);
    if (rope.contains("truncate") && rope.at("truncate") != json(true)) {
      refuse(fmt::format("{}: truncate: the bounds of yarn are whole pairs here", section));
    }
    const double mscale = number(rope, "mscale", 0.0);
    const double mscale_all_dim = number(rope, "mscale_all_dim", 0.0);
    if (has(rope, "attention_factor")) {
      attention["rope_attention_factor"] = required(rope, section, "attention_factor");
      if (attention["rope_attention_factor"] == 0.0) {
        refuse(fmt::format("{}: attention_factor is 0", section));
      }
    } else if (mscale != 0 && mscale_all_dim != 0) {
      const double ln = std::log(std::max(factor, 1.0));
      attention["rope_attention_factor"] =
          (0.1 * mscale * ln + 1.0) / (0.1 * mscale_all_dim * ln + 1.0);
    }
  }

  // no_rope_layers: 1 where a layer has rotary positions.
  json some_rope(const json& rotated) const {
    const int64_t layers = whole("num_hidden_layers");
    const int64_t interval = has("no_rope_layer_interval") ? whole("no_rope_layer_interval") : 4;
    json unrotated = {{"type", "softmax"}, {"position", "none"}};
    for (const char* key : {"qkv_bias", "output_bias"}) {
      if (rotated.contains(key)) unrotated[key] = true;
    }
    if (layers < 1 || layers > 100000 || interval < 1) refuse("num_hidden_layers is out of range");
    json list = json::array();
    for (int64_t l = 0; l < layers; ++l) {
      bool rope = (l + 1) % interval != 0;
      if (has("no_rope_layers")) {
        const json& given = hf_.at("no_rope_layers");
        if (!given.is_array() || static_cast<int64_t>(given.size()) < layers ||
            !given.at(static_cast<size_t>(l)).is_number_integer()) {
          refuse("no_rope_layers is not a list with a number for each layer");
        }
        rope = given.at(static_cast<size_t>(l)).get<int64_t>() != 0;
      }
      list.push_back(rope ? rotated : unrotated);
    }
    if (std::ranges::all_of(list, [&](const json& layer) { return layer == list.front(); })) {
      return list.front();
    }
    return list;
  }

  const json& hf_;
  const std::string& name_;
  bool tied_;
  std::string type_;
};

}  // namespace

Config config_from_hf(const json& hf, bool tied, const std::string& name) {
  const HfConfig reader(hf, tied, name);
  // JSON is YAML, so that the model section is read and checked as that of any configuration.
  const json whole = {
      {"name", "imported"},
      {"model", reader.section()},
      {"train", {{"sequence_length", reader.length()}, {"micro_batch", 1}, {"batch", 1}}},
      {"data", {{"sources", {{{"path", "train.h5"}}}}}},
      {"stages", {{{"name", "train"}, {"length", "1000 steps"}}}}};
  return parse_config(whole.dump(), name);
}

}  // namespace sbtrain
