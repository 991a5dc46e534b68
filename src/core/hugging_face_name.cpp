#include "core/hugging_face_name.h"

#include <fmt/core.h>

#include <algorithm>
#include <cctype>
#include <string_view>

#include "core/files.h"

namespace sbtrain {
namespace {

bool is_part(std::string_view part) {
  return !part.empty() && std::isalnum(static_cast<unsigned char>(part.front())) != 0 &&
         std::ranges::all_of(part, [](char c) {
           return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_' ||
                  c == '.';
         });
}

}  // namespace

std::string hugging_face_hint(const std::filesystem::path& path) {
  std::string_view name = path.native();
  if (name.ends_with('/')) name.remove_suffix(1);
  const size_t slash = name.find('/');
  if (slash == std::string_view::npos || is_there(path)) return "";
  const std::string_view model = name.substr(slash + 1);
  if (!is_part(name.substr(0, slash)) || !is_part(model)) return "";
  return fmt::format(
      "; if it is the name of a model on the Hugging Face hub, fetch it with `hf download {} "
      "--local-dir {}` and give the folder, or the file in it",
      name, model);
}

}  // namespace sbtrain
