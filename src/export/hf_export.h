// Writes a checkpoint's model as a Hugging Face folder: weights in safetensors, config.json,
// generation_config.json, the tokenizer's files, a model card, and code where the model needs it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "checkpoint/checkpoint.h"
#include "export/hf_layout.h"
#include "train/run_config.h"

namespace sbtrain {

struct HfExportOptions {
  std::filesystem::path output;  // must not exist, or be an empty folder
  FileDType dtype = FileDType::kF32;
  std::string tokenizer{};       // model file; empty: none is known
  std::string tokenizer_hash{};  // of the text of training; empty: that of `tokenizer`
  bool starts_with_bos = false;  // documents began with bos in training
  bool average = false;  // the checkpoint reads the average of the weights, as the card says
  uint64_t shard_bytes = 5'000'000'000;
  // Called when all is written and before it has its final name; what it throws undoes the export.
  std::function<void(const std::filesystem::path& folder)> check{};
};

// Refuses an output folder, with ExitCode::kUsage, that holds something or lies in the run or
// checkpoint folder `input`.
void check_export_output(const std::filesystem::path& output, const std::filesystem::path& input);

// config.json says by `sbtrain.tokenizer_hash` to which tokenizer the weights belong, so that they
// are not used with another one. Everything is written to OUTPUT.tmp, flushed and renamed. Weights
// are converted in parts of 8 MiB, one for each thread, so that the memory does not depend on the
// model. Throws ExitCode::kUsage for the output folder, kNoCheckpoint for damaged weights,
// kDiverged for weights that are not finite, kConfig for weights that the type cannot hold and for
// a tokenizer of more pieces than the vocabulary, kStorage.
void export_hf(const CheckpointReader& checkpoint, const Config& config, const HfLayout& layout,
               const HfExportOptions& options);

}  // namespace sbtrain
