#include "export/hf_layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "config/schema.h"
#include "config/values.h"
#include "core/error.h"
#include "export/python.h"
#include "model/transformer.h"

namespace sbtrain {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

json typed(const std::string& text) {
  bool flag = false;
  int64_t whole = 0;
  double number = 0;
  if (schema::from_text(text, flag)) return flag;
  if (schema::from_text(text, whole)) return whole;
  if (schema::from_text(text, number)) return number;
  return text;
}

// Sets "attention.0.type" and the like.
void set_path(json& at, std::string_view path, json value) {
  const size_t dot = path.find('.');
  const std::string key(path.substr(0, dot));
  const bool index = key.find_first_not_of("0123456789") == std::string::npos;
  json& member = index ? at[std::stoul(key)] : at[key];
  if (dot == std::string_view::npos) {
    member = std::move(value);
  } else {
    set_path(member, path.substr(dot + 1), std::move(value));
  }
}

bool scales_low_frequencies(std::string_view rope_scaling) {
  return rope_scaling == "yarn" || rope_scaling == "llama3";
}

// What decides among the architectures.
class Facts {
 public:
  explicit Facts(const Config& config) : model(config.model), section(model_json(config.model)) {
    const json& attention = section.at("attention");
    for (int64_t l = 0; l < model.layers; ++l) {
      layers.push_back(attention.is_array()
                           ? attention.at(static_cast<size_t>(l) % attention.size())
                           : attention);
    }
    if (model.position == PositionEmbedding::kLearned) {
      length = model.max_positions;
    } else {
      length = rotary_length(config.train.sequence_length);
    }
  }

  // The options of the first layer with rotary positions; without one, of the first layer.
  const json& rotary() const {
    const auto found = std::ranges::find_if(
        layers, [](const json& layer) { return layer.value("position", "") == "rope"; });
    return found == layers.end() ? first() : *found;
  }

  const json& first() const { return layers.front(); }
  bool flag(const char* key) const { return first().value(key, false); }
  double number(const char* key, double otherwise = 0) const {
    return first().value(key, otherwise);
  }
  std::string text(const char* key, const char* otherwise) const {
    return first().value(key, otherwise);
  }
  bool all(const char* key, const char* value) const {
    return std::ranges::all_of(layers,
                               [&](const json& layer) { return layer.value(key, "") == value; });
  }
  bool plain_block() const {
    return model.norm == NormKind::kRmsNorm && model.mlp == MlpKind::kSwiGlu &&
           model.position == PositionEmbedding::kNone;
  }
  // Whether layers differ in nothing but the presence of rotary positions.
  bool uniform() const {
    json rotary;
    for (const json& layer : layers) {
      if (layer.value("position", "") == "rope") rotary = layer;
    }
    if (rotary.is_null()) rotary = first();
    return std::ranges::all_of(layers, [&](json layer) {
      if (layer.value("position", "") == "none" && layer.value("type", "") == "softmax") {
        layer = without_rope(std::move(layer));
        return layer == without_rope(rotary);
      }
      return layer == rotary;
    });
  }
  int64_t kv_heads() const {
    const int64_t heads = section.value("kv_heads", int64_t{0});
    return heads > 0 ? heads : model.heads;
  }
  double scale() const {
    const double given = number("logit_scale");
    return given != 0 ? given : 1.0 / std::sqrt(static_cast<double>(model.head_width()));
  }
  // The factor of the logits of attention that the architectures without such an option lack.
  double query_factor() const {
    const double given = number("logit_scale");
    return given != 0 ? given * std::sqrt(static_cast<double>(model.head_width())) : 1.0;
  }
  bool has_factors() const {
    return model.embedding_multiplier != 1.0 || model.residual_multiplier != 1.0 ||
           model.logits_multiplier != 1.0 || query_factor() != 1.0;
  }

  const ModelConfig& model;
  json section;
  std::vector<json> layers;  // the options of each layer's attention
  int64_t length = 0;        // that the model is made for

 private:
  int64_t rotary_length(int64_t trained) const {
    const json& options = rotary();
    const std::string scaling = options.value("rope_scaling", "none");
    const auto train_length = options.value("rope_train_length", int64_t{0});
    if (scaling == "dynamic_ntk") return train_length;
    if (!scales_low_frequencies(scaling)) return trained;
    // Where the scaling ends; transformers compares it with the factor.
    return std::llround(options.value("rope_factor", 1.0) * static_cast<double>(train_length));
  }
  static json without_rope(json layer) {
    layer["position"] = "none";
    for (auto option = layer.begin(); option != layer.end();) {
      option = option.key().starts_with("rope_") ? layer.erase(option) : std::next(option);
    }
    return layer;
  }
};

// The architecture of transformers that computes the same; empty: none does.
std::string architecture_of(const Facts& f) {
  if (!f.plain_block() || !f.all("type", "softmax") || !f.uniform()) return "";
  const bool rope = f.all("position", "rope");
  const bool rope_or_none = std::ranges::all_of(f.layers, [](const json& layer) {
    return layer.value("position", "") == "rope" || layer.value("position", "") == "none";
  });
  const bool window = f.number("window") != 0;
  const bool qkv_bias = f.flag("qkv_bias");
  const bool same_biases = qkv_bias == f.flag("output_bias");
  if (!rope_or_none) return "";
  if (f.flag("qk_norm")) return rope && !window && same_biases ? "Qwen3ForCausalLM" : "";
  if (!rope) return !window && same_biases ? "SmolLM3ForCausalLM" : "";
  if (window) return !qkv_bias && same_biases ? "MistralForCausalLM" : "";
  if (!same_biases) return qkv_bias ? "Qwen2ForCausalLM" : "";
  return f.has_factors() ? "GraniteForCausalLM" : "LlamaForCausalLM";
}

const char* model_type_of(std::string_view architecture) {
  if (architecture == "GraniteForCausalLM") return "granite";
  if (architecture == "MistralForCausalLM") return "mistral";
  if (architecture == "SmolLM3ForCausalLM") return "smollm3";
  if (architecture == "Qwen2ForCausalLM") return "qwen2";
  if (architecture == "Qwen3ForCausalLM") return "qwen3";
  return "llama";
}

// Rotary positions in the forms of transformers 5 (rope_parameters) and of older programs.
void add_rope(ordered_json& config, const Facts& f) {
  const json& options = f.rotary();
  double base = options.value("rope_base", 10000.0);
  const std::string scaling = options.value("rope_scaling", "none");
  const double factor = options.value("rope_factor", 1.0);
  const auto d = static_cast<double>(f.model.head_width());
  if (scaling == "ntk") base *= std::pow(factor, d / (d - 2));
  ordered_json rope = {{"rope_type", "default"}};
  if (scaling == "linear") rope = {{"rope_type", "linear"}, {"factor", factor}};
  if (scaling == "dynamic_ntk") rope = {{"rope_type", "dynamic"}, {"factor", factor}};
  if (scales_low_frequencies(scaling)) {
    rope = {{"rope_type", scaling},
            {"factor", factor},
            {"original_max_position_embeddings", options.value("rope_train_length", int64_t{0})}};
  }
  const auto set = [&](const char* key, const char* option, double otherwise) {
    rope[key] = options.value(option, otherwise);
  };
  if (scaling == "yarn") {
    set("beta_fast", "rope_beta_fast", 32.0);
    set("beta_slow", "rope_beta_slow", 1.0);
    if (options.value("rope_attention_factor", 0.0) != 0) {
      set("attention_factor", "rope_attention_factor", 0.0);
    }
  }
  if (scaling == "llama3") {
    set("low_freq_factor", "rope_low_freq_factor", 1.0);
    set("high_freq_factor", "rope_high_freq_factor", 4.0);
  }
  config["rope_theta"] = base;
  if (rope.contains("factor")) config["rope_scaling"] = rope;
  rope["rope_theta"] = base;
  config["rope_parameters"] = rope;
}

ordered_json transformers_config(const Facts& f, const std::string& architecture) {
  const ModelConfig& m = f.model;
  ordered_json config = {{"architectures", {architecture}},
                         {"model_type", model_type_of(architecture)},
                         {"vocab_size", m.vocab},
                         {"hidden_size", m.width},
                         {"intermediate_size", m.inner},
                         {"num_hidden_layers", m.layers},
                         {"num_attention_heads", m.heads},
                         {"num_key_value_heads", f.kv_heads()},
                         {"head_dim", m.head_width()},
                         {"hidden_act", "silu"},
                         {"max_position_embeddings", f.length},
                         {"initializer_range", m.init_std},
                         {"rms_norm_eps", m.norm_eps},
                         {"tie_word_embeddings", m.tied},
                         {"use_cache", true}};
  add_rope(config, f);
  if (architecture == "MistralForCausalLM") {
    config["sliding_window"] = static_cast<int64_t>(f.number("window"));
  } else if (architecture == "Qwen2ForCausalLM") {
    config["use_sliding_window"] = false;
  } else {
    config["attention_bias"] = f.flag("qkv_bias");
  }
  if (architecture == "Qwen3ForCausalLM") config["use_sliding_window"] = false;
  if (architecture == "SmolLM3ForCausalLM") {
    ordered_json rotated = ordered_json::array();
    for (const json& layer : f.layers) {
      rotated.push_back(layer.value("position", "") == "rope" ? 1 : 0);
    }
    config["no_rope_layers"] = rotated;
    config["use_sliding_window"] = false;
  }
  if (architecture == "GraniteForCausalLM") {
    config["embedding_multiplier"] = m.embedding_multiplier;
    config["residual_multiplier"] = m.residual_multiplier;
    config["logits_scaling"] = 1.0 / m.logits_multiplier;
    config["attention_multiplier"] = f.scale();
  }
  return config;
}

ordered_json own_config(const Facts& f) {
  return {{"architectures", {"SbtrainForCausalLM"}},
          {"model_type", "sbtrain"},
          {"auto_map",
           {{"AutoConfig", "configuration_sbtrain.SbtrainConfig"},
            {"AutoModelForCausalLM", "modeling_sbtrain.SbtrainForCausalLM"}}},
          {"vocab_size", f.model.vocab},
          {"hidden_size", f.model.width},
          {"intermediate_size", f.model.inner},
          {"num_hidden_layers", f.model.layers},
          {"num_attention_heads", f.model.heads},
          {"num_key_value_heads", f.kv_heads()},
          {"head_dim", f.model.head_width()},
          {"max_position_embeddings", f.length},
          {"tie_word_embeddings", f.model.tied},
          {"use_cache", true},
          {"sbtrain", f.section}};
}

ordered_json fla_config(const Facts& f) {
  const ModelConfig& m = f.model;
  return {{"architectures", {"StickBreakingAttentionForCausalLM"}},
          {"model_type", "stickbreaking_attn"},
          {"vocab_size", m.vocab},
          {"hidden_size", m.width},
          {"intermediate_size", m.inner},
          {"num_hidden_layers", m.layers},
          {"num_heads", m.heads},
          {"num_kv_heads", f.kv_heads()},
          {"qkv_bias", f.flag("qkv_bias")},
          {"qk_norm", f.flag("qk_norm")},
          {"attend_current", f.flag("attend_current")},
          {"hidden_act", "swish"},
          {"max_position_embeddings", f.length},
          {"initializer_range", m.init_std},
          {"norm_eps", m.norm_eps},
          {"tie_word_embeddings", m.tied},
          {"use_cache", false}};
}

// modeling_sbtrain.py tells modules apart by their names. A folder with another one would only be
// refused when somebody loads it.
void check_own_code(const Facts& f) {
  for (const json& layer : f.layers) {
    const auto type = layer.at("type").get<std::string>();
    const bool known = std::ranges::any_of(model_code(), [&](const PythonFile& file) {
      return file.text.find('"' + type + '"') != std::string_view::npos;
    });
    if (known) continue;
    fail(ExitCode::kConfig,
         "attention of type {} cannot be exported: modeling_sbtrain.py does not compute it", type);
  }
}

void check_fla(const Facts& f) {
  std::vector<std::string> reasons;
  const auto unless = [&](bool good, std::string reason) {
    if (!good) reasons.push_back(std::move(reason));
  };
  const bool stickbreaking = f.all("type", "stickbreaking");
  unless(stickbreaking, "every layer must have attention of type stickbreaking");
  unless(f.model.norm == NormKind::kRmsNorm, "model.norm must be rmsnorm");
  unless(f.model.mlp == MlpKind::kSwiGlu, "model.mlp must be swiglu");
  unless(f.model.position == PositionEmbedding::kNone, "model.position must be none");
  unless(f.model.query_width() == f.model.width,
         "it has heads of model.width / model.heads, so leave out model.head_dim");
  if (stickbreaking) {
    unless(f.uniform(), "all layers must have the same attention");
    unless(f.text("remainder", "none") == "none", "it gives the remainder to nothing");
    unless(!f.flag("head_norm"), "it has no head_norm");
    unless(!f.flag("forget_gate"), "it has no forget_gate");
    unless(!f.flag("output_bias"), "it has no output_bias");
  }
  if (reasons.empty()) return;
  fail(ExitCode::kConfig,
       "flash-linear-attention's stick-breaking model cannot hold this one:\n  {}\nUse --format hf",
       fmt::join(reasons, "\n  "));
}

std::string fla_name(std::string name) {
  const auto replace = [&](std::string_view from, std::string_view to) {
    if (const size_t at = name.find(from); at != std::string::npos) {
      name.replace(at, from.size(), to);
    }
  };
  replace("embed_tokens.", "embeddings.");
  replace("input_layernorm.", "attn_norm.");
  replace("post_attention_layernorm.", "mlp_norm.");
  replace("self_attn.", "attn.");
  return name;
}

// The factors that the multipliers of the configuration become when the architecture has none. The
// head may share the embedding's table, so that both of their factors meet in the last norm.
double folded_factor(const Facts& f, std::string_view name) {
  const ModelConfig& m = f.model;
  if (name == "model.embed_tokens.weight") return m.embedding_multiplier;
  if (name == "model.norm.weight") {
    return m.logits_multiplier / (m.tied ? m.embedding_multiplier : 1.0);
  }
  if (name.ends_with("self_attn.o_proj.weight") || name.ends_with("mlp.down_proj.weight")) {
    return m.residual_multiplier;
  }
  const bool query = f.flag("qk_norm") ? name.ends_with("self_attn.q_norm.weight")
                                       : name.ends_with("self_attn.q_proj.weight") ||
                                             name.ends_with("self_attn.q_proj.bias");
  return query ? f.query_factor() : 1.0;
}

}  // namespace

json model_json(const ModelConfig& model) {
  constexpr std::string_view kPrefix = "model.";
  Config config;
  config.model = model;
  json section = json::object();
  for (const auto& [key, value] : flatten(config)) {
    if (!key.starts_with(kPrefix)) continue;
    set_path(section, std::string_view(key).substr(kPrefix.size()), typed(value));
  }
  return section;
}

const char* torch_dtype_name(FileDType dtype) {
  if (dtype == FileDType::kBF16) return "bfloat16";
  return dtype == FileDType::kF16 ? "float16" : "float32";
}

HfLayout hf_layout(const Config& config, ExportFormat format, FileDType dtype) {
  const Facts facts(config);
  HfLayout layout;
  if (format == ExportFormat::kFla) {
    check_fla(facts);
    layout.config = fla_config(facts);
  } else if (const std::string known = architecture_of(facts); !known.empty()) {
    layout.config = transformers_config(facts, known);
  } else {
    check_own_code(facts);
    layout.own_code = true;
    layout.config = own_config(facts);
  }
  layout.architecture = layout.config.at("architectures").at(0).get<std::string>();
  layout.config["dtype"] = torch_dtype_name(dtype);
  layout.config["torch_dtype"] = torch_dtype_name(dtype);  // as versions before 5 call it
  const bool folds = !layout.own_code && layout.architecture != "GraniteForCausalLM";
  const Transformer model(config.model);
  for (const ParamUnit& unit : model.registry().units()) {
    for (const PlacedTensor& tensor : unit.tensors) {
      layout.tensors.push_back(
          {.name = format == ExportFormat::kFla ? fla_name(tensor.name) : tensor.name,
           .source = tensor.name,
           .shape = tensor.spec.shape,
           .factor = folds ? folded_factor(facts, tensor.name) : 1.0});
    }
  }
  return layout;
}

}  // namespace sbtrain
