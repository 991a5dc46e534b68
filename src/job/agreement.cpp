#include "job/agreement.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "core/error.h"
#include "core/sha256.h"
#include "job/tcp_control.h"

namespace sbtrain {
namespace {

using Fields = std::map<std::string, std::string>;

constexpr size_t kMostShown = 5;  // fields, and different variants

// What some of the ranks have, and which ranks these are.
struct Variant {
  std::string digest;
  std::vector<int> ranks{};
  Fields fields{};
};

std::vector<Variant> variants_of(const std::vector<std::string>& digests) {
  std::vector<Variant> variants;
  for (size_t rank = 0; rank < digests.size(); ++rank) {
    auto variant = std::ranges::find(variants, digests[rank], &Variant::digest);
    if (variant == variants.end())
      variant = variants.insert(variants.end(), {.digest = digests[rank]});
    variant->ranks.push_back(static_cast<int>(rank));
  }
  return variants;
}

std::string value_of(const Fields& fields, const std::string& name) {
  const auto found = fields.find(name);
  return found == fields.end() ? "nothing" : fmt::format("'{}'", found->second);
}

// "  train.lr: '1e-3' on ranks 0, 1, 3; '2e-3' on rank 2"
std::string describe_difference(const std::string& name, const std::vector<Variant>& variants) {
  std::map<std::string, std::vector<int>> ranks;
  for (const Variant& variant : variants) {
    std::vector<int>& same = ranks[value_of(variant.fields, name)];
    same.insert(same.end(), variant.ranks.begin(), variant.ranks.end());
  }
  if (ranks.size() < 2) return "";
  std::string text;
  for (auto& [value, of] : ranks) {
    std::ranges::sort(of);
    text += fmt::format("{}{} on rank{} {}", text.empty() ? "" : "; ", value,
                        of.size() == 1 ? "" : "s", control::describe_ranks(of));
  }
  return fmt::format("\n  {}: {}", name, text);
}

}  // namespace

void agree(Control& control, const Fields& fields) {
  const std::vector<int> everyone = all_ranks(control.world());
  const std::string text = nlohmann::json(fields).dump(-1, ' ', /*ensure_ascii=*/true,
                                                       nlohmann::json::error_handler_t::replace);
  std::vector<Variant> variants =
      variants_of(control.exchange("agreement", everyone, sha256_hex(text)));
  if (variants.size() == 1) return;
  if (variants.size() > kMostShown) variants.resize(kMostShown);
  // One rank of each variant tells the others what it has.
  const auto speaks = [&](const Variant& variant) {
    return variant.ranks.front() == control.rank();
  };
  const std::vector<std::string> texts = control.exchange(
      "disagreement", everyone, std::ranges::any_of(variants, speaks) ? text : std::string());
  std::set<std::string> names;
  for (Variant& variant : variants) {
    variant.fields = nlohmann::json::parse(texts[variant.ranks.front()]).get<Fields>();
    for (const auto& [name, value] : variant.fields) names.insert(name);
  }
  std::string differences;
  size_t shown = 0;
  for (const std::string& name : names) {
    const std::string difference = describe_difference(name, variants);
    if (difference.empty()) continue;
    if (++shown <= kMostShown) differences += difference;
  }
  if (shown > kMostShown) differences += fmt::format("\n  and {} more", shown - kMostShown);
  fail(ExitCode::kConfig, "the ranks of this job are not alike:{}", differences);
}

}  // namespace sbtrain
