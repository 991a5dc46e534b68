// Options of commands that may drop keys from the cache by their forget gates.
#pragma once

#include "attention/kept_keys.h"
#include "cli/options.h"

namespace sbtrain {

// --drop-below and --cache-share.
void add_cache_options(Command command, KeyDropping& dropping);
// --cache-share, which needs `drop_below`.
void add_cache_share(Command command, double& share, const Option& drop_below);
// "12.3% of the keys kept, 1.5 MB".
std::string cache_text(const CacheUse& use);

}  // namespace sbtrain
