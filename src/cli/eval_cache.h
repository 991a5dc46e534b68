// The options of sbtrain eval for a cache that drops keys by their gates.
#pragma once

#include <vector>

#include "attention/kept_keys.h"
#include "cli/options.h"

namespace sbtrain {

struct CacheEvalOptions {
  std::vector<double> drop_below;  // one row of results each
  double share = 1;

  // To be called when the command has its other options, of which --drop-below excludes many.
  void add(Command command);
  bool asked() const { return !drop_below.empty(); }
  KeyDropping dropping(double below) const { return {.below = below, .share = share}; }
};

}  // namespace sbtrain
