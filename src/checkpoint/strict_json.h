// JSON as files of this program write it. A plain parser accepts an object that has a name twice,
// and takes one of the two values without a word.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sbtrain {

// Parses `text`. Throws ExitCode::kNoCheckpoint, naming `what` (the file, and which part of it),
// for text that is no JSON, for objects with a name twice, and for nesting deeper than `max_depth`.
nlohmann::json parse_strict(std::string_view text, const std::string& what, int max_depth);

}  // namespace sbtrain
