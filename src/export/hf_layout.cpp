#include "export/hf_layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "attention/registry.h"
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

bool scales_low_frequencies(RotaryScaling scaling) {
  return scaling == RotaryScaling::kYarn || scaling == RotaryScaling::kLlama3;
}

// The attention of one layer, and what its module says of it.
struct Layer {
  explicit Layer(const AttentionConfig& config) : attention(config) {
    const AttentionModule& module = attention_registry().at(config.type);
    ModuleOptions options = config.options;
    if (const RotaryOptions* given = module.rotary(options)) rotary = *given;
    transformers = module.transformers(config.options);
    fla = module.fla(config.options);
  }
  const AttentionConfig& attention;
  std::optional<RotaryOptions> rotary;
  std::optional<TransformersAttention> transformers;
  std::optional<FlaAttention> fla;
};

// What decides among the architectures.
class Facts {
 public:
  explicit Facts(const Config& config) : model(config.model) {
    for (int64_t l = 0; l < model.layers; ++l) {
      layers.emplace_back(model.attention.at(static_cast<size_t>(l) % model.attention.size()));
    }
    if (model.position == PositionEmbedding::kLearned) {
      length = model.max_positions;
    } else {
      length = rotary_length(config.train.sequence_length);
    }
  }

  const AttentionConfig& first() const { return layers.front().attention; }
  // Blocks as Llama has them, but for where their norms stand.
  bool plain_block() const {
    return model.norm == NormKind::kRmsNorm && model.mlp == MlpKind::kSwiGlu &&
           model.position == PositionEmbedding::kNone && !model.parallel_residual;
  }
  // Blocks as GPT-2 and GPT-NeoX have them, which take no multipliers.
  bool gpt_block() const {
    return model.norm == NormKind::kLayerNorm && norms_input() &&
           (model.mlp == MlpKind::kGelu || model.mlp == MlpKind::kGeluTanh) &&
           model.key_heads() == model.heads && model.query_width() == model.width &&
           !has_factors(0);
  }
  bool norms_input() const { return model.norm_position == NormPosition::kInput; }
  // The attention of all layers in transformers, with the rotary positions of those that have some;
  // nothing if they differ in anything else, or if one of them is not there.
  std::optional<TransformersAttention> transformers() const {
    std::optional<TransformersAttention> all;
    for (const Layer& layer : layers) {
      if (!layer.transformers || layer.attention.output_bias != first().output_bias) return {};
      TransformersAttention own = *layer.transformers;
      if (!all) all = own;
      if (!all->rotary) all->rotary = own.rotary;
      if (!own.rotary) own.rotary = all->rotary;
      if (own != *all) return {};
    }
    return all;
  }
  // Whether every layer has rotary positions in transformers.
  bool all_rotary() const {
    return std::ranges::all_of(layers, [](const Layer& layer) {
      return layer.transformers && layer.transformers->rotary;
    });
  }
  // The factor of the logits of attention that the architectures without such an option lack.
  double query_factor(double logit_scale) const {
    if (logit_scale == 0) return 1.0;
    return logit_scale * std::sqrt(static_cast<double>(model.head_width()));
  }
  bool has_factors(double logit_scale) const {
    return model.embedding_multiplier != 1.0 || model.residual_multiplier != 1.0 ||
           model.logits_multiplier != 1.0 || query_factor(logit_scale) != 1.0;
  }

  const ModelConfig& model;
  std::vector<Layer> layers;
  int64_t length = 0;  // that the model is made for

 private:
  int64_t rotary_length(int64_t trained) const {
    const auto found =
        std::ranges::find_if(layers, [](const Layer& layer) { return layer.rotary.has_value(); });
    if (found == layers.end()) return trained;
    const RotaryOptions& rotary = *found->rotary;
    if (rotary.scaling == RotaryScaling::kDynamicNtk) return rotary.train_length;
    if (!scales_low_frequencies(rotary.scaling)) return trained;
    // Where the scaling ends; transformers compares it with the factor.
    return std::llround(rotary.factor * static_cast<double>(rotary.train_length));
  }
};

// Of blocks that are GPT-2's or GPT-NeoX's.
std::string gpt_architecture_of(const Facts& f, const TransformersAttention& attention) {
  if (attention.window != 0 || attention.qk_norm) return "";
  const bool output_bias = f.first().output_bias;
  if (f.model.position == PositionEmbedding::kLearned) {
    const bool scaled = attention.logit_scale == 0 || attention.logit_scale == 1;
    const bool same = attention.qkv_bias && output_bias && scaled && !f.model.parallel_residual;
    return !attention.rotary && same ? "GPT2LMHeadModel" : "";
  }
  const bool same = attention.qkv_bias == output_bias && attention.logit_scale == 0;
  return f.all_rotary() && same ? "GPTNeoXForCausalLM" : "";
}

// The architecture of transformers that computes the same; empty: none does.
std::string architecture_of(const Facts& f, const TransformersAttention& attention) {
  if (f.gpt_block()) return gpt_architecture_of(f, attention);
  if (!f.plain_block()) return "";
  const bool rope = f.all_rotary();
  const bool window = attention.window != 0;
  const bool qkv_bias = attention.qkv_bias;
  const bool same_biases = qkv_bias == f.first().output_bias;
  if (attention.rotary && attention.rotary->fraction != 1.0) return "";
  if (!f.norms_input() || attention.joint_qk_norm) {
    const bool same = rope && !window && same_biases && attention.joint_qk_norm;
    return same && !f.norms_input() ? "Olmo2ForCausalLM" : "";
  }
  if (attention.qk_norm) return rope && !window && same_biases ? "Qwen3ForCausalLM" : "";
  if (!rope) return !window && same_biases ? "SmolLM3ForCausalLM" : "";
  if (window) return !qkv_bias && same_biases ? "MistralForCausalLM" : "";
  if (!same_biases) return qkv_bias ? "Qwen2ForCausalLM" : "";
  return f.has_factors(attention.logit_scale) ? "GraniteForCausalLM" : "LlamaForCausalLM";
}

const char* model_type_of(std::string_view architecture) {
  if (architecture == "GraniteForCausalLM") return "granite";
  if (architecture == "MistralForCausalLM") return "mistral";
  if (architecture == "SmolLM3ForCausalLM") return "smollm3";
  if (architecture == "Qwen2ForCausalLM") return "qwen2";
  if (architecture == "Qwen3ForCausalLM") return "qwen3";
  if (architecture == "Olmo2ForCausalLM") return "olmo2";
  if (architecture == "GPTNeoXForCausalLM") return "gpt_neox";
  if (architecture == "GPT2LMHeadModel") return "gpt2";
  return "llama";
}

// Rotary positions in the forms of transformers 5 (rope_parameters) and of older programs.
void add_rope(ordered_json& config, const RotaryOptions& rotary, int64_t head_dim) {
  double base = rotary.base;
  const RotaryScaling scaling = rotary.scaling;
  const auto d = static_cast<double>(rotary.rotated(head_dim));
  if (scaling == RotaryScaling::kNtk) base *= std::pow(rotary.factor, d / (d - 2));
  ordered_json rope = {{"rope_type", "default"}};
  if (scaling == RotaryScaling::kLinear) {
    rope = {{"rope_type", "linear"}, {"factor", rotary.factor}};
  }
  if (scaling == RotaryScaling::kDynamicNtk) {
    rope = {{"rope_type", "dynamic"}, {"factor", rotary.factor}};
  }
  if (scales_low_frequencies(scaling)) {
    rope = {{"rope_type", name_of(scaling)},
            {"factor", rotary.factor},
            {"original_max_position_embeddings", rotary.train_length}};
  }
  if (scaling == RotaryScaling::kYarn) {
    rope["beta_fast"] = rotary.beta_fast;
    rope["beta_slow"] = rotary.beta_slow;
    if (rotary.attention_factor != 0) rope["attention_factor"] = rotary.attention_factor;
  }
  if (scaling == RotaryScaling::kLlama3) {
    rope["low_freq_factor"] = rotary.low_freq_factor;
    rope["high_freq_factor"] = rotary.high_freq_factor;
  }
  const bool neox = config.at("model_type") == "gpt_neox";
  config[neox ? "rotary_emb_base" : "rope_theta"] = base;
  if (neox) config["rotary_pct"] = rotary.fraction;
  if (rope.contains("factor")) config["rope_scaling"] = rope;
  rope["rope_theta"] = base;
  if (neox) rope["partial_rotary_factor"] = rotary.fraction;
  config["rope_parameters"] = rope;
}

const char* activation_of(MlpKind mlp) {
  return mlp == MlpKind::kGeluTanh ? "gelu_new" : "gelu";
}

ordered_json gpt2_config(const Facts& f, const TransformersAttention& attention) {
  const ModelConfig& m = f.model;
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"model_type", "gpt2"},
          {"vocab_size", m.vocab},
          {"n_embd", m.width},
          {"n_inner", m.inner},
          {"n_layer", m.layers},
          {"n_head", m.heads},
          {"n_positions", m.max_positions},
          {"n_ctx", m.max_positions},
          {"activation_function", activation_of(m.mlp)},
          {"layer_norm_epsilon", m.norm_eps},
          {"initializer_range", m.init_std},
          {"scale_attn_weights", attention.logit_scale == 0},
          {"scale_attn_by_inverse_layer_idx", false},
          {"resid_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"attn_pdrop", 0.0},
          {"tie_word_embeddings", m.tied},
          {"use_cache", true}};
}

ordered_json gpt_neox_config(const Facts& f, const TransformersAttention& attention) {
  const ModelConfig& m = f.model;
  ordered_json config = {{"architectures", {"GPTNeoXForCausalLM"}},
                         {"model_type", "gpt_neox"},
                         {"vocab_size", m.vocab},
                         {"hidden_size", m.width},
                         {"intermediate_size", m.inner},
                         {"num_hidden_layers", m.layers},
                         {"num_attention_heads", m.heads},
                         {"hidden_act", activation_of(m.mlp)},
                         {"max_position_embeddings", f.length},
                         {"initializer_range", m.init_std},
                         {"layer_norm_eps", m.norm_eps},
                         {"use_parallel_residual", m.parallel_residual},
                         {"attention_bias", attention.qkv_bias},
                         {"attention_dropout", 0.0},
                         {"hidden_dropout", 0.0},
                         {"tie_word_embeddings", m.tied},
                         {"use_cache", true}};
  add_rope(config, *attention.rotary, m.head_width());
  return config;
}

ordered_json transformers_config(const Facts& f, const TransformersAttention& attention,
                                 const std::string& architecture) {
  if (architecture == "GPT2LMHeadModel") return gpt2_config(f, attention);
  if (architecture == "GPTNeoXForCausalLM") return gpt_neox_config(f, attention);
  const ModelConfig& m = f.model;
  ordered_json config = {{"architectures", {architecture}},
                         {"model_type", model_type_of(architecture)},
                         {"vocab_size", m.vocab},
                         {"hidden_size", m.width},
                         {"intermediate_size", m.inner},
                         {"num_hidden_layers", m.layers},
                         {"num_attention_heads", m.heads},
                         {"num_key_value_heads", m.key_heads()},
                         {"head_dim", m.head_width()},
                         {"hidden_act", "silu"},
                         {"max_position_embeddings", f.length},
                         {"initializer_range", m.init_std},
                         {"rms_norm_eps", m.norm_eps},
                         {"tie_word_embeddings", m.tied},
                         {"use_cache", true}};
  add_rope(config, attention.rotary.value_or(RotaryOptions{}), m.head_width());
  if (architecture == "MistralForCausalLM") {
    config["sliding_window"] = attention.window;
  } else if (architecture == "Qwen2ForCausalLM") {
    config["use_sliding_window"] = false;
  } else {
    config["attention_bias"] = attention.qkv_bias;
  }
  if (architecture == "Qwen3ForCausalLM") config["use_sliding_window"] = false;
  if (architecture == "SmolLM3ForCausalLM") {
    ordered_json rotated = ordered_json::array();
    for (const Layer& layer : f.layers) rotated.push_back(layer.transformers->rotary ? 1 : 0);
    config["no_rope_layers"] = rotated;
    config["use_sliding_window"] = false;
  }
  if (architecture == "GraniteForCausalLM") {
    config["embedding_multiplier"] = m.embedding_multiplier;
    config["residual_multiplier"] = m.residual_multiplier;
    config["logits_scaling"] = 1.0 / m.logits_multiplier;
    config["attention_multiplier"] = attention.logit_scale != 0
                                         ? attention.logit_scale
                                         : 1.0 / std::sqrt(static_cast<double>(m.head_width()));
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
          {"num_key_value_heads", f.model.key_heads()},
          {"head_dim", f.model.head_width()},
          {"max_position_embeddings", f.length},
          {"tie_word_embeddings", f.model.tied},
          {"use_cache", true},
          {"sbtrain", model_json(f.model)}};
}

ordered_json fla_config(const Facts& f, const FlaAttention& attention) {
  const ModelConfig& m = f.model;
  return {{"architectures", {"StickBreakingAttentionForCausalLM"}},
          {"model_type", "stickbreaking_attn"},
          {"vocab_size", m.vocab},
          {"hidden_size", m.width},
          {"intermediate_size", m.inner},
          {"num_hidden_layers", m.layers},
          {"num_heads", m.heads},
          {"num_kv_heads", m.key_heads()},
          {"qkv_bias", attention.qkv_bias},
          {"qk_norm", attention.qk_norm},
          {"attend_current", attention.attend_current},
          {"hidden_act", "swish"},
          {"max_position_embeddings", f.length},
          {"initializer_range", m.init_std},
          {"norm_eps", m.norm_eps},
          {"tie_word_embeddings", m.tied},
          {"use_cache", false}};
}

// Whether a line @attention("...") of the Python code names the module.
bool has_code(const std::string& type) {
  constexpr std::string_view kMark = "\n@attention(";
  for (const PythonFile& file : model_code()) {
    for (size_t at = file.text.find(kMark); at != std::string_view::npos;) {
      const std::string_view names = file.text.substr(at, file.text.find('\n', at + 1) - at);
      if (names.find('"' + type + '"') != std::string_view::npos) return true;
      at = file.text.find(kMark, at + 1);
    }
  }
  return false;
}

// A folder with a module that modeling_sbtrain.py lacks would only be refused when somebody loads
// it.
void check_own_code(const Facts& f) {
  for (const Layer& layer : f.layers) {
    if (has_code(layer.attention.type)) continue;
    fail(ExitCode::kConfig,
         "attention of type {} cannot be exported: modeling_sbtrain.py does not compute it",
         layer.attention.type);
  }
}

// The attention of all layers in flash-linear-attention's stick-breaking model.
FlaAttention fla_attention(const Facts& f) {
  std::vector<std::string> reasons;
  const auto unless = [&](bool good, std::string reason) {
    if (!good) reasons.push_back(std::move(reason));
  };
  const bool stickbreaking =
      std::ranges::all_of(f.layers, [](const Layer& layer) { return layer.fla.has_value(); });
  unless(stickbreaking, "every layer must have attention of type stickbreaking");
  unless(f.model.norm == NormKind::kRmsNorm, "model.norm must be rmsnorm");
  unless(f.model.mlp == MlpKind::kSwiGlu, "model.mlp must be swiglu");
  unless(f.model.position == PositionEmbedding::kNone, "model.position must be none");
  unless(f.norms_input(), "model.norm_position must be input");
  unless(!f.model.parallel_residual, "it has no parallel_residual");
  unless(f.model.query_width() == f.model.width,
         "it has heads of model.width / model.heads, so leave out model.head_dim");
  if (stickbreaking) {
    unless(std::ranges::all_of(f.layers,
                               [&](const Layer& layer) { return layer.attention == f.first(); }),
           "all layers must have the same attention");
    const FlaAttention& attention = *f.layers.front().fla;
    reasons.insert(reasons.end(), attention.lacks.begin(), attention.lacks.end());
    unless(!f.first().output_bias, "it has no output_bias");
  }
  if (reasons.empty()) return *f.layers.front().fla;
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

// What the stored weights are multiplied by for an architecture that lacks the multipliers of the
// configuration.
struct Folding {
  double query = 1.0;    // of the queries
  bool qk_norm = false;  // whose weights are the last that scale the queries
};

// The head may share the embedding's table, so that both of their factors meet in the last norm.
double folded_factor(const ModelConfig& m, const Folding& folding, std::string_view name) {
  if (name == "model.embed_tokens.weight") return m.embedding_multiplier;
  if (name == "model.norm.weight") {
    return m.logits_multiplier / (m.tied ? m.embedding_multiplier : 1.0);
  }
  if (name.ends_with("self_attn.o_proj.weight") || name.ends_with("mlp.down_proj.weight")) {
    return m.residual_multiplier;
  }
  const bool query = folding.qk_norm ? name.ends_with("self_attn.q_norm.weight")
                                     : name.ends_with("self_attn.q_proj.weight") ||
                                           name.ends_with("self_attn.q_proj.bias");
  return query ? folding.query : 1.0;
}

// The layout without tensors, and what its tensors are multiplied by, if they are.
std::pair<HfLayout, std::optional<Folding>> architecture_layout(const Config& config,
                                                                ExportFormat format) {
  const Facts facts(config);
  HfLayout layout;
  layout.length = facts.length;
  const auto folding = [&](const auto& attention) {
    return Folding{.query = facts.query_factor(attention.logit_scale),
                   .qk_norm = attention.qk_norm};
  };
  if (format == ExportFormat::kFla) {
    const FlaAttention attention = fla_attention(facts);
    layout.config = fla_config(facts, attention);
    return {layout, folding(attention)};
  }
  if (const auto attention = facts.transformers()) {
    const std::string known = architecture_of(facts, *attention);
    if (!known.empty()) {
      layout.config = transformers_config(facts, *attention, known);
      if (known == "GraniteForCausalLM" || facts.gpt_block()) return {layout, {}};
      return {layout, folding(*attention)};
    }
  }
  check_own_code(facts);
  layout.own_code = true;
  layout.config = own_config(facts);
  return {layout, {}};
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
  auto [layout, folding] = architecture_layout(config, format);
  layout.architecture = layout.config.at("architectures").at(0).get<std::string>();
  layout.config["dtype"] = torch_dtype_name(dtype);
  layout.config["torch_dtype"] = torch_dtype_name(dtype);  // as versions before 5 call it
  const Transformer model(config.model);
  const auto type = layout.config.at("model_type").get<std::string>();
  for (const ParamUnit& unit : model.registry().units()) {
    for (const PlacedTensor& tensor : unit.tensors) {
      const std::string name = format == ExportFormat::kFla ? fla_name(tensor.name) : tensor.name;
      const StoredPlace place = stored_place(type, name);
      if (place.part > 0) {  // its first part has been there, with the shape of all of them
        std::ranges::find(layout.tensors, place.name, &ExportTensor::name)
            ->sources.push_back(tensor.name);
        continue;
      }
      layout.tensors.push_back(
          {.name = place.name,
           .sources = {tensor.name},
           .shape = stored_shape(place, tensor.spec.shape),
           .layout = parts_layout(place, tensor.spec.shape, config.model.head_width()),
           .factor = folding ? folded_factor(config.model, *folding, tensor.name) : 1.0});
    }
  }
  return layout;
}

}  // namespace sbtrain
