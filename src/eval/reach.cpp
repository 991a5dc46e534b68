#include "eval/reach.h"

#include <limits>

#include "eval/rank_sums.h"

namespace sbtrain {
namespace {

struct Sums {
  HeadReach layers;
  void visit(const auto& f) {
    for (std::vector<KeysRead>& heads : layers) {
      for (KeysRead& head : heads) {
        f(head.read);
        f(head.visible);
        for (int64_t& queries : head.beyond) f(queries);
      }
    }
  }
};

}  // namespace

double share_read(const KeysRead& keys) {
  return keys.visible > 0 ? static_cast<double>(keys.read) / static_cast<double>(keys.visible)
                          : std::numeric_limits<double>::quiet_NaN();
}

// The first transfer brings the keys in front of a part, the one after it those that lie a part
// and more before every query.
int hops_needed(const KeysRead& keys, int ranks) {
  const int eighths = static_cast<int>(keys.beyond.size()) / ranks;
  int hops = 0;
  while (hops < ranks - 1 && keys.beyond[static_cast<size_t>(hops * eighths)] > 0) ++hops;
  return hops;
}

KeysRead all_of(std::span<const KeysRead> heads) {
  KeysRead all;
  for (const KeysRead& head : heads) all += head;
  return all;
}

KeysRead all_of(const HeadReach& layers) {
  KeysRead all;
  for (const std::vector<KeysRead>& heads : layers) all += all_of(heads);
  return all;
}

HeadReach measure_reach(Control& ranks, const WindowReader& reader, std::span<const Window> windows,
                        int64_t length, int64_t layers, int64_t heads,
                        const ReachOfBatch& of_batch) {
  const Sums zero{
      HeadReach(static_cast<size_t>(layers), std::vector<KeysRead>(static_cast<size_t>(heads)))};
  const auto of_window = [&](int64_t i) {
    const PackedBatch batch = reader.batch_of(windows.subspan(static_cast<size_t>(i), 1), length);
    Sums sums = zero;
    const HeadReach found = of_batch(batch, length);
    for (size_t l = 0; l < found.size(); ++l) {
      if (!found[l].empty()) sums.layers.at(l) = found[l];
    }
    return sums;
  };
  return sum_over_ranks<Sums>(ranks, static_cast<int64_t>(windows.size()), zero, of_window).layers;
}

}  // namespace sbtrain
