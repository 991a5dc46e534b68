// How far the heads of a model reach: the share of the visible keys that each of them reads before
// its stick is used up (arXiv 2410.17980, "block skipping").
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "data/batch.h"
#include "eval/windows.h"
#include "job/control.h"

namespace sbtrain {

// By layer and head. Heads of a module that never skips a key count nothing.
using HeadReach = std::vector<std::vector<KeysRead>>;

// The share that was read; NaN where nothing was counted.
double share_read(const KeysRead& keys);
// Of a window that `ranks` share in consecutive parts (2, 4 or 8 of them): how many of the
// ranks - 1 transfers of keys bring any that is read.
int hops_needed(const KeysRead& keys, int ranks);
// Over heads or layers.
KeysRead all_of(std::span<const KeysRead> heads);
KeysRead all_of(const HeadReach& layers);

// What one forward pass over a batch reads; `max_seqlen` bounds the lengths of its documents. A
// layer may list no head.
using ReachOfBatch = std::function<HeadReach(const PackedBatch& batch, int64_t max_seqlen)>;

// Sums over windows of `length` tokens, one at a time, in a model of `layers` with `heads` each.
// The windows are dealt to the ranks.
HeadReach measure_reach(Control& ranks, const WindowReader& reader, std::span<const Window> windows,
                        int64_t length, int64_t layers, int64_t heads,
                        const ReachOfBatch& of_batch);

}  // namespace sbtrain
