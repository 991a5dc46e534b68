// What collectives would move, recorded instead of done: a rank's part in a step that is planned
// for any number of GPUs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/communicator.h"

namespace sbtrain {

// How the ranks of a communicator lie on nodes. A node's ranks follow each other, so a ring in rank
// order crosses the network once a node.
struct GroupLayout {
  int ranks = 1;
  int nodes = 1;  // on which they lie
  bool operator==(const GroupLayout&) const = default;
};

struct Transfer {
  Collective collective{};
  GroupLayout group;
  // Of the whole tensor: what each rank of the group holds after a gather, all-reduce or broadcast,
  // and before a reduce-scatter or an all-to-all.
  int64_t bytes = 0;
  // By the copy engines: a gather, or an all-to-all, which then is one gather for each rank.
  bool copied = false;
};

struct Traffic {
  std::vector<Transfer> transfers;  // in the order in which the step starts them
};

// Rank `rank` of `world`, of which each `node_size` in a row are on one node, for plans: it moves
// nothing, adds every collective of a stream that plans to `record` (which may be null), and
// answers the host as if every rank had passed what this one has. Its groups record into the same
// Traffic. A collective on a real stream throws ExitCode::kInternal.
std::unique_ptr<Communicator> make_planned(int rank, int world, int node_size, Traffic* record);

}  // namespace sbtrain
