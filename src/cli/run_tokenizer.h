// The tokenizer of a trained model: where it is, and whether one is the one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "config/config.h"
#include "data/tokenizer.h"

namespace sbtrain {

// What the checkpoint says of the text that the model was trained on.
struct TrainingText {
  std::string tokenizer_hash;    // empty: unknown, or none
  bool starts_with_bos = false;  // documents did
};
TrainingText training_text(const CheckpointReader& checkpoint);

// The model file to use: `given`, else the copy in the run's folder, else that of the run's
// configuration; empty where none is known.
std::string run_tokenizer(const CheckpointReader& checkpoint, const Config& config,
                          const std::string& given);

// Throws ExitCode::kConfig where the model was trained on text of another tokenizer.
void check_tokenizer(const Tokenizer& tokenizer, const TrainingText& text);

// The prompt's tokens as documents started in training, with bos in front where they had it. An
// empty prompt without bos is eos: what follows it in training is a new document. Throws
// ExitCode::kUsage where the tokenizer has neither.
std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const TrainingText& text,
                                   const std::string& prompt);

}  // namespace sbtrain
