// From config.json to our configuration.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "config/schema.h"
#include "core/error.h"
#include "export/hf_folder.h"

namespace sbtrain {
namespace {

using nlohmann::json;

// Training sequences of an imported model, which also are the windows of `sbtrain eval`, are at
// most so long: many models claim more than a machine can hold at once.
constexpr int64_t kLongestSequence = 4096;

class HfConfig {
 public:
  HfConfig(const json& hf, bool tied, const std::string& name) : hf_(hf), name_(name), tied_(tied) {
    if (!hf.is_object()) refuse("it is not an object");
    type_ = text("model_type", "");
  }

  json section() const {
    if (type_ == "sbtrain") return own();
    if (type_ == "stickbreaking_attn") return stickbreaking();
    static constexpr std::string_view kKnown[] = {"llama",   "granite", "mistral",
                                                  "smollm3", "qwen2",   "qwen3"};
    if (std::ranges::count(kKnown, type_) == 0) {
      refuse(
          fmt::format("there is no model for model_type '{}'; {} can be read, and "
                      "stickbreaking_attn and sbtrain",
                      type_, fmt::join(kKnown, ", ")));
    }
    return softmax();
  }

  int64_t length() const {
    const char* key = "max_position_embeddings";
    const int64_t given = has(key) ? whole(key) : kLongestSequence;
    return std::clamp<int64_t>(given, 1, kLongestSequence);
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    fail(ExitCode::kConfig, "{}: {}", name_, why);
  }
  bool has(const char* key) const { return hf_.contains(key) && !hf_.at(key).is_null(); }
  const json& need(const char* key) const {
    if (!has(key)) refuse(fmt::format("{} is missing", key));
    return hf_.at(key);
  }
  int64_t whole(const char* key) const {
    const json& value = need(key);
    if (!value.is_number_integer()) {
      refuse(fmt::format("{} is {}, not a whole number", key, value.dump()));
    }
    return value.get<int64_t>();
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
                    {"norm_eps", number(hf_, eps_key, 1e-6)},
                    {"mlp", "swiglu"},
                    {"init_std", number(hf_, "initializer_range", 0.02)}};
    if (has(kv_key) && whole(kv_key) != heads) section["kv_heads"] = whole(kv_key);
    const std::string activation = text("hidden_act", "silu");
    if (activation != "silu" && activation != "swish") {
      refuse(fmt::format("hidden_act '{}': only silu can be read", activation));
    }
    if (flag("mlp_bias")) refuse("mlp_bias: the MLP has no biases here");
    if (has("head_dim") && heads > 0 && whole("head_dim") * heads != whole("hidden_size")) {
      refuse(fmt::format("head_dim {}: it must be hidden_size / {} = {} / {}", whole("head_dim"),
                         heads_key, whole("hidden_size"), heads));
    }
    return section;
  }

  json own() const {
    const json& section = need("sbtrain");
    if (!section.is_object()) refuse("sbtrain is not an object");
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
    if (type_ == "qwen3") attention["qk_norm"] = true;
    if (type_ == "granite") {
      section["embedding_multiplier"] = number(hf_, "embedding_multiplier", 1);
      section["residual_multiplier"] = number(hf_, "residual_multiplier", 1);
      section["logits_multiplier"] = 1.0 / number(hf_, "logits_scaling", 1);
      attention["logit_scale"] = number(hf_, "attention_multiplier", 1);
    }
    section["attention"] = type_ == "smollm3" ? some_rope(attention) : attention;
    return section;
  }

  void add_rope(json& attention) const {
    const char* key = has("rope_parameters") ? "rope_parameters" : "rope_scaling";
    const json rope = has(key) ? hf_.at(key) : json::object();
    if (!rope.is_object()) refuse(fmt::format("{} is not an object", key));
    const double base = number(rope, "rope_theta",
                               number(hf_, "rope_theta", type_ == "smollm3" ? 2000000.0 : 10000.0));
    attention["rope_base"] = base;
    for (const json* at : {&rope, &hf_}) {
      if (number(*at, "partial_rotary_factor", 1.0) != 1.0) {
        refuse("partial_rotary_factor: heads are rotated whole here");
      }
    }
    const std::string kind = text(rope, "rope_type", text(rope, "type", "default").c_str());
    if (kind == "default") return;
    if (kind != "linear" && kind != "dynamic") {
      refuse(
          fmt::format("{}: rotary positions of the type '{}' cannot be computed; default, linear "
                      "and dynamic can",
                      key, kind));
    }
    attention["rope_scaling"] = kind == "linear" ? "linear" : "dynamic_ntk";
    attention["rope_factor"] = number(rope, "factor", 1.0);
    if (kind == "dynamic") attention["rope_train_length"] = whole("max_position_embeddings");
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
