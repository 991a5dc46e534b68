// Finds the tokenizer of a trained model, and checks that a given one is the right one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "tokenizer/tokenizer.h"
#include "train/run_config.h"

namespace sbtrain {

// What a checkpoint records about the text that the model was trained on.
struct TrainingText {
  std::string tokenizer_hash;    // empty: unknown, or none
  bool starts_with_bos = false;  // every document started with bos
};
TrainingText training_text(const CheckpointReader& checkpoint);

// The tokenizer's file: `given`, else the copy in the run's folder, else that of the run's
// configuration; empty if none is known.
std::string run_tokenizer(const CheckpointReader& checkpoint, const Config& config,
                          const std::string& given);

// Throws ExitCode::kConfig if the model was trained on text of another tokenizer.
void check_tokenizer(const Tokenizer& tokenizer, const TrainingText& text);

// The run's tokenizer, checked against the model, for prompts: they may hold the special tokens of
// a chat template. Throws ExitCode::kUsage if none is known, kConfig if it is not the model's.
Tokenizer load_tokenizer(const CheckpointReader& checkpoint, const Config& config,
                         const TrainingText& text, const std::string& given);

// The tokens of a prompt, which begin like the documents in training: with bos if those had it. An
// empty prompt without bos becomes eos, after which a new document begins in training. Throws
// ExitCode::kUsage if the tokenizer has neither.
std::vector<int32_t> prompt_tokens(const Tokenizer& tokenizer, const TrainingText& text,
                                   const std::string& prompt);

}  // namespace sbtrain
