#include "core/hugging_face_name.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>

#include "core/files.h"

namespace sbtrain {
namespace {

// Models that everybody calls by a name without an owner, as the hub does.
constexpr std::array<std::string_view, 5> kWithoutOwner = {"gpt2", "gpt2-medium", "gpt2-large",
                                                           "gpt2-xl", "distilgpt2"};

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
  const bool has_owner = slash != std::string_view::npos;
  const std::string_view model = has_owner ? name.substr(slash + 1) : name;
  const bool known = has_owner ? is_part(name.substr(0, slash)) && is_part(model)
                               : std::ranges::count(kWithoutOwner, name) > 0;
  if (!known || is_there(path)) return "";
  return fmt::format(
      "; if it is the name of a model on the Hugging Face hub, fetch it with `hf download {} "
      "--local-dir {}` and give the folder, or the file in it",
      name, model);
}

}  // namespace sbtrain
