// What a configuration says of the data of a run, as the loader and the held-out data take it.
#pragma once

#include <map>
#include <string>

#include "data/loader.h"
#include "parallel/mesh.h"
#include "train/run_config.h"

namespace sbtrain {

// The hash of the tokenizer of all the text that the run trains on, in all stages; empty for tasks.
// Opens every store, so that a missing one is found now and not when its stage begins. Throws
// ExitCode::kConfig if they were prepared with different ones, or not with data.tokenizer.
std::string training_tokenizer(const Config& config);

// For the loader of this rank of the mesh, in a stage.
LoaderOptions loader_options(const Config& config, const Mesh& mesh, int stage);

// The data and the position in it, one field for each value, so that messages name those that
// differ: "(data)/sources/0/content_hash".
std::map<std::string, std::string> data_fields(const LoaderState& state);

}  // namespace sbtrain
