// JSON as files of this program write it. A plain parser accepts an object that has a name twice,
// and takes one of the two values without a word.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace sbtrain {

// Parses `text`. Throws ExitCode::kNoCheckpoint, naming `what` (the file, and which part of it),
// for text that is no JSON, for objects with a name twice, and for nesting deeper than `max_depth`.
nlohmann::json parse_strict(std::string_view text, const std::string& what, int max_depth);

// The same for an object of which each member is used and forgotten: visit(name, value) is called
// for one after the other, in the order of the text. Other values than objects are refused too.
using VisitMember = std::function<void(const std::string& name, const nlohmann::json& value)>;
void parse_members(std::string_view text, const std::string& what, int max_depth,
                   const VisitMember& visit);

}  // namespace sbtrain
