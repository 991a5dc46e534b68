// Names of the Hugging Face hub, from which this program fetches nothing.
#pragma once

#include <filesystem>
#include <string>

namespace sbtrain {

// For the message about `path`, where nothing is: how to fetch it if it looks like the name of a
// model on the hub, OWNER/NAME or a name of GPT-2. Begins with "; "; empty if it does not look like
// one, or is there.
std::string hugging_face_hint(const std::filesystem::path& path);

}  // namespace sbtrain
