// Turns a Hugging Face folder into a run folder with a checkpoint of step 0.
#pragma once

#include <filesystem>

#include "export/hf_folder.h"

namespace sbtrain {

struct HfImport {
  std::filesystem::path checkpoint;  // <output>/checkpoints/step-00000000
  bool has_tokenizer = false;        // the folder's was copied
};

// Writes <output>: the checkpoint, which holds the weights as f32 and no moments of the optimizer,
// config.yaml, run.json and the tokenizer. Tensors are copied in parts of 8 MiB. `output` must not
// exist or be an empty folder (check_export_output); everything is written to OUTPUT.tmp and
// renamed. Throws ExitCode::kConfig with all names and shapes in which folder and configuration
// disagree, and for a tokenizer that is not the one of the weights or has more pieces than the
// vocabulary, kNoCheckpoint for damaged files and for weights that are not finite, kData for a
// tokenizer that is damaged or that this program cannot compute, kStorage. `with_tokenizer`: false
// leaves the folder's tokenizer out, whatever it is.
HfImport import_hf(const HfFolder& folder, const std::filesystem::path& output,
                   bool with_tokenizer = true);

}  // namespace sbtrain
