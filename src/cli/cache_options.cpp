#include "cli/cache_options.h"

#include <fmt/format.h>

namespace sbtrain {
namespace {

constexpr const char* kGroup = "Cache";

}  // namespace

void add_cache_options(Command command, KeyDropping& dropping) {
  const Option below =
      command
          .add_option("--drop-below", dropping.below,
                      "Keep no keys of a head whose forget gates are below this; 0: keep all")
          .check(in_range(0.0, 1.0))
          .capture_default_str()
          .group(kGroup);
  add_cache_share(command, dropping.share, below);
}

void add_cache_share(Command command, double& share, const Option& drop_below) {
  command
      .add_option(
          "--cache-share", share,
          "With --drop-below: the share of all keys that the cache takes memory for at most")
      .check(in_range(1e-6, 1.0))
      .capture_default_str()
      .needs(drop_below)
      .group(kGroup);
}

std::string cache_text(const CacheUse& use) {
  return fmt::format("{:.1f}% of the keys kept, {:.1f} MB", 100.0 * use.share_kept(),
                     static_cast<double>(use.bytes) / 1e6);
}

}  // namespace sbtrain
