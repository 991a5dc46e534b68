// Checks an exported folder: the logits of our model beside those that Python computes from it.
#pragma once

#include <filesystem>
#include <string>

#include "checkpoint/checkpoint.h"
#include "export/hf_layout.h"
#include "train/run_config.h"

namespace sbtrain {

// Throws ExitCode::kUsage, with what to install, unless the Python interpreter has what
// verify_export needs for this layout.
void check_verify_packages(const HfLayout& layout);

// Runs a short prompt through the checkpoint's model, on the CPU in f32 with its weights rounded as
// the folder's are, and through transformers (or, for our own code, PyTorch alone where
// transformers is missing). Returns a sentence with the largest difference. Throws
// ExitCode::kInternal if it exceeds 1e-4 of the largest logit. Holds the model in memory twice.
std::string verify_export(const std::filesystem::path& folder, const CheckpointReader& checkpoint,
                          const Config& config, const HfLayout& layout, FileDType dtype);

}  // namespace sbtrain
