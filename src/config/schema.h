// Reading, checking, printing and documenting configurations. All of it follows from one
// description of the fields (config/schema.cpp).
//
// Precedence, lowest first: defaults, `include:`d files, the file, SBTRAIN_... environment
// variables, --key=value options. Maps merge key by key, lists and scalars are replaced.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "train/run_config.h"

namespace sbtrain {

// One key set from outside the file.
struct Override {
  std::string key;     // "train.lr", "stages.0.length"
  std::string value;   // a scalar as it is; lists and maps in YAML: "[a.h5, b.h5]"
  std::string origin;  // how messages name it: "--train.lr", "SBTRAIN_TRAIN__LR"
};

// Reads `path` (empty: only the defaults) with everything that it includes, applies the overrides,
// of which later ones win, and validates. Throws ExitCode::kConfig with the file, line and column,
// or the override's origin, of every problem found.
Config load_config(const std::string& path, const std::vector<Override>& overrides = {});

// The same for a text that has no file and includes none, such as the configuration stored with a
// checkpoint; messages call it `name`.
Config parse_config(std::string_view text, std::string_view name,
                    const std::vector<Override>& overrides = {});

// One attention module by itself, written as in model.attention: "{type: softmax, window: 512}".
// What depends on the model is not checked.
AttentionConfig parse_attention(std::string_view text);

// The environment variables that name configuration keys: SBTRAIN_ and the key in upper case,
// with two underscores for each dot (SBTRAIN_TRAIN__LR, SBTRAIN_STAGES__0__LENGTH). `environment`
// is a null-terminated array of NAME=value, as in environ. The prefix is reserved: load_config
// reports a name that is not a key.
std::vector<Override> environment_overrides(const char* const* environment);

// Splits "train.lr=1e-3" as given to --set; messages will call it --train.lr.
// Throws ExitCode::kUsage when there is no '='.
Override parse_override(std::string_view assignment);

// Cross-field checks for a configuration built in code; load_config does them itself.
void validate_config(const Config& config);

// The whole configuration as YAML, which parse_config reads back to an equal Config. Keys that do
// not apply, such as the window of another attention type, are left out.
std::string config_yaml(const Config& config);

// Every key that applies, with its value as text: "stages.0.length" -> "300 steps". For comparing
// two runs key by key.
std::map<std::string, std::string> flatten(const Config& config);
std::map<std::string, std::string> flatten(const AttentionConfig& config);

// The reference of all keys, as Markdown (docs/config.md) and for --help.
std::string config_markdown();
std::string config_help();

// Type, default, choices and meaning of one key or section, "*" standing for a list index.
// Throws ExitCode::kConfig with the nearest match for an unknown key.
std::string field_help(std::string_view key);

// Single values at the top level and their meaning: "seed", "device", ...
std::vector<std::pair<std::string, std::string>> top_level_keys();

}  // namespace sbtrain
