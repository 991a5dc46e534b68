// How a run's checkpoints lie on disk, for the files that implement checkpoint.h: the names in the
// run's folder, and keys and shapes in the shards.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/manifest.h"

namespace sbtrain {

inline constexpr std::string_view kUnfinished = ".tmp";  // being written, or being removed
inline constexpr std::string_view kReplaced = ".old";    // set aside by a save at the same step
inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kStateName = "state.json";
inline constexpr const char* kConfigName = "config.yaml";
inline constexpr const char* kLatest = "latest";

std::filesystem::path checkpoints_of(const std::filesystem::path& run);
std::string step_name(int64_t step);  // "step-00000100"

// The step of "step-00000100" + suffix; nothing for any other name.
std::optional<int64_t> parse_step(std::string_view name, std::string_view suffix = "");

// The names in a folder, sorted; none if it does not exist.
std::vector<std::string> names_in(const std::filesystem::path& folder);

// "adam_m/model.norm.weight".
std::string key_of(std::string_view kind, std::string_view name);

// The shape in a shard's file. A whole tensor keeps its own, so that other programs can use it; a
// part of a tensor is a flat range.
std::vector<int64_t> stored_shape(const std::vector<int64_t>& shape, int64_t begin, int64_t end);

}  // namespace sbtrain
