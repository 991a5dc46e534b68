// How a model stands in a Hugging Face folder: the architecture that computes what it computes, its
// config.json, and the names of its tensors.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "export/hf_tensors.h"
#include "train/run_config.h"

namespace sbtrain {

enum class ExportFormat : uint8_t {
  kHf,   // an architecture of transformers, or else the code of this project
  kFla,  // flash-linear-attention's stick-breaking model
};
template <>
inline constexpr auto kNames<ExportFormat> =
    enum_names<ExportFormat>({{ExportFormat::kHf, "hf"}, {ExportFormat::kFla, "fla"}});

struct ExportTensor {
  std::string name;                  // in the folder
  std::vector<std::string> sources;  // in the checkpoint: all that it holds, in their order
  std::vector<int64_t> shape;        // in the folder
  PartsLayout layout{};              // of the sources in it
  double factor = 1.0;               // the stored value over the checkpoint's
};

struct HfLayout {
  std::string architecture;       // "LlamaForCausalLM"
  bool own_code = false;          // SbtrainForCausalLM, which comes with the folder
  nlohmann::ordered_json config;  // config.json
  int64_t length = 0;             // of the texts that the model is made for
  std::vector<ExportTensor> tensors;
};

// The layout of the model of `config`, its numbers stored as `dtype`.
//
// With kHf, softmax attention becomes LlamaForCausalLM; GraniteForCausalLM if there are multipliers
// or a logit_scale; Mistral with a window; SmolLM3 without positions in some or all layers; Qwen2
// with biases of q, k and v; Qwen3 with qk_norm; Olmo2 with norms at the outputs and a joint
// qk_norm; with LayerNorm and GELU GPTNeoX, or GPT2LMHeadModel with learned positions. Multipliers
// that an architecture lacks are folded into the weights: ExportTensor::factor. Every other model
// becomes SbtrainForCausalLM; throws ExitCode::kConfig where an attention module is not in its
// code. With kFla, throws ExitCode::kConfig naming everything that the format cannot say.
HfLayout hf_layout(const Config& config, ExportFormat format, FileDType dtype);

// The model section of config.yaml as JSON.
nlohmann::json model_json(const ModelConfig& model);

// "float32", "bfloat16" or "float16".
const char* torch_dtype_name(FileDType dtype);

}  // namespace sbtrain
