#include "parallel/network.h"

#include <algorithm>

namespace sbtrain {
namespace {

// A smaller all-reduce is of the numbers that the update waits for.
constexpr int64_t kSmall = int64_t{1} << 16;

bool reduces(const Transfer& transfer) {
  return transfer.collective == Collective::kReduceScatter ||
         transfer.collective == Collective::kAllToAll ||
         transfer.collective == Collective::kAllReduce;
}

// Computation, and the collectives that run beside it.
struct Window {
  double compute = 0;  // seconds
  double alone = 0;    // of the collectives, if nothing else ran
  double beside = 0;   // the same, beside products
  double kernels = 0;  // of these, what runs on multiprocessors
  // The share of the collectives that the computation lasts for.
  double hidden() const { return beside > 0 ? std::min(1.0, compute / beside) : 1.0; }
};

}  // namespace

double ring_share(Collective collective, int ranks) {
  if (ranks < 2) return 0;
  if (collective == Collective::kBroadcast || collective == Collective::kShift) return 1;
  const double once = static_cast<double>(ranks - 1) / ranks;
  return collective == Collective::kAllReduce ? 2 * once : once;
}

double seconds(const Transfer& transfer, const MachineConfig& machine, bool beside_products) {
  const auto ranks = static_cast<double>(transfer.group.ranks);
  const auto nodes = static_cast<double>(transfer.group.nodes);
  if (ranks < 2) return 0;
  if (transfer.copied && transfer.collective == Collective::kAllToAll) {
    Transfer gather = transfer;
    gather.collective = Collective::kAllGather;
    return ranks * seconds(gather, machine, beside_products);
  }
  const double passes = transfer.collective == Collective::kAllReduce ? 2 : 1;
  const double bytes =
      static_cast<double>(transfer.bytes) * ring_share(transfer.collective, transfer.group.ranks);
  double busy = 0;
  if (ranks > nodes) {
    const bool slower = beside_products && !transfer.copied;
    busy = bytes / (1e9 * machine.nvlink_gbs) * (slower ? machine.stretch : 1);
  }
  // Of a node's ranks all take part in a ring, but only one has its neighbour on another node.
  const bool one_hop = transfer.collective == Collective::kShift;
  const double ports = one_hop ? 1 : ranks / nodes;
  if (nodes > 1) busy = std::max(busy, bytes / (1e9 * machine.network_gbs * ports));
  const double crossings = nodes > 1 ? passes * (one_hop ? 1 : nodes - 1) : 0;
  const double hops = passes * (one_hop ? 1 : ranks - 1) - crossings;
  return busy +
         1e-6 * (machine.latency_us + hops * machine.hop_us + crossings * machine.network_hop_us);
}

StepEstimate estimate_step(const Traffic& traffic, double compute, const MachineConfig& machine,
                           const StepShape& shape) {
  const std::vector<Transfer>& all = traffic.transfers;
  const auto large = [](const Transfer& t) { return t.bytes >= kSmall; };
  const auto numbers = [&](const Transfer& t) {
    return t.collective == Collective::kAllReduce && !large(t);
  };
  // What follows the sum of loss and norm is the update's, but for weights that grad gathers then.
  const auto sum = std::find_if(all.rbegin(), all.rend(), numbers);
  const auto in_update = [&](const Transfer& t) {
    return sum != all.rend() && &t > &*sum && large(t) &&
           (reduces(t) || shape.sharding != Sharding::kGrad);
  };
  const auto first = std::find_if(all.begin(), all.end(), large);
  const auto last = std::find_if(all.rbegin(), all.rend(), [&](const Transfer& t) {
    return large(t) && reduces(t) && !in_update(t);
  });
  // A unit's gradients may take two reductions: within the node, then across nodes.
  auto last_begin = last;
  if (last != all.rend() && last + 1 != all.rend() && reduces(*(last + 1)) && large(*(last + 1)) &&
      (last + 1)->group != last->group) {
    ++last_begin;
  }
  StepEstimate estimate{.compute = compute};
  Window every, forward, backward, update;
  every.compute = compute;
  update.compute = shape.update;
  forward.compute = compute / 3 / static_cast<double>(shape.micro_batches);
  backward.compute = 2 * forward.compute;
  const auto window_of = [&](const Transfer& t) -> Window& {
    if (in_update(t)) return update;
    if (shape.sharding == Sharding::kGrad && !reduces(t)) return forward;
    const bool across = shape.sharding == Sharding::kHybrid && t.group.nodes > 1;
    return reduces(t) && (shape.sharding == Sharding::kNone || across) ? backward : every;
  };
  for (const Transfer& transfer : all) {
    const double time = seconds(transfer, machine);
    estimate.communication += time;
    const bool at_an_end =
        &transfer == &*first ||
        (last != all.rend() && (&transfer == &*last || &transfer == &*last_begin));
    if (at_an_end || numbers(transfer)) {
      estimate.exposed += time;
    } else {
      Window& window = window_of(transfer);
      const double beside = seconds(transfer, machine, /*beside_products=*/true);
      window.alone += time;
      window.beside += beside;
      if (!transfer.copied) window.kernels += beside;
    }
  }
  for (const Window& window : {every, forward, backward, update}) {
    estimate.exposed += (1 - window.hidden()) * window.alone;
    estimate.interference += machine.interference * window.hidden() * window.kernels;
  }
  if (std::ranges::any_of(all, &Transfer::copied)) estimate.slowest = machine.spread * compute;
  return estimate;
}

}  // namespace sbtrain
