// English words for the prompts of text tasks: 337 adjectives, 528 nouns and 284 verbs of
// lower-case letters, each list in alphabetical order and all of them different.
#pragma once

#include <string>
#include <vector>

namespace sbtrain {

const std::vector<std::string>& adjectives();
const std::vector<std::string>& nouns();
const std::vector<std::string>& verbs();

}  // namespace sbtrain
