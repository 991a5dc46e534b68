// Which tokens of a micro-batch that N ranks share each of them holds (train.context_layout).
//
// All tokens of the micro-batch, in a line, are cut into chunks of the same size. A rank holds
//   consecutive   one of N chunks
//   folded        two of 2N, the one as far from the beginning of the line as the other is from its
//                 end: 0 and 2N - 1, 1 and 2N - 2, ..., N - 1 and N
// Under a causal mask the ranks of a folded line all read equally many keys (docs/long_context.md).
#pragma once

#include <vector>

#include "core/enum_names.h"

namespace sbtrain {

enum class ContextLayout : uint8_t { kAuto, kConsecutive, kFolded };
template <>
inline constexpr auto kNames<ContextLayout> =
    enum_names<ContextLayout>({{ContextLayout::kAuto, "auto"},
                               {ContextLayout::kConsecutive, "consecutive"},
                               {ContextLayout::kFolded, "folded"}});

// How many chunks a rank holds.
constexpr int chunks_of_rank(ContextLayout layout) {
  return layout == ContextLayout::kFolded ? 2 : 1;
}
// The places of the chunks of rank `rank` of `ranks` in the line, in its order.
inline std::vector<int> places_of(ContextLayout layout, int rank, int ranks) {
  if (layout == ContextLayout::kFolded) return {rank, 2 * ranks - 1 - rank};
  return {rank};
}

}  // namespace sbtrain
