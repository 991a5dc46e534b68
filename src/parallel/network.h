// How long collectives take on a machine of many nodes, and how much of a step they cost: a model,
// for plans of runs on more GPUs than there are at hand.
//
// A ring of W ranks takes W - 1 hops, and moves ring_share() of a tensor over each link. Inside a
// node the links are NVLink. Between nodes every GPU has a network port of its own, and a ring
// crosses with as many ports as it has ranks on a node.
#pragma once

#include "parallel/machine.h"
#include "parallel/sharding.h"
#include "parallel/traffic.h"

namespace sbtrain {

// The share of a tensor's bytes that passes over each link of a ring of `ranks`: (W - 1) / W, twice
// that in an all-reduce, and all of them in a broadcast, which is a chain, and in a shift.
double ring_share(Collective collective, int ranks);

// Seconds of one collective, when nothing else runs or beside matrix products, which slow down none
// by the copy engines.
double seconds(const Transfer& transfer, const MachineConfig& machine,
               bool beside_products = false);

struct StepEstimate {
  double compute = 0;        // seconds, as given
  double communication = 0;  // of all collectives, one after the other, when nothing else runs
  double exposed = 0;        // of collectives that nothing hides
  double interference = 0;   // that products lose to the collectives beside them
  double slowest = 0;        // for the slowest GPU, where transfers are by the copy engines
  double total() const { return compute + exposed + interference + slowest; }
};

// What of a step decides which computation a collective runs beside.
struct StepShape {
  Sharding sharding = Sharding::kFull;
  int64_t micro_batches = 1;  // of a rank
  double update = 0;          // seconds of the optimizer's work that collectives can run beside
};

// A step that computes for `compute` seconds and starts the collectives of `traffic` beside that
// (TrainStep::plan_step records them). The first gather and the last reduction of a step have
// nothing to hide behind, nor has the sum of loss and norm, which the update waits for; the others
// are hidden as far as the computation beside them lasts. That is all of it for what every
// micro-batch needs. Gradients that are reduced once a step (in mode none, and in hybrid across
// nodes) have only the backward pass of the last micro-batch, two thirds of its time; weights that
// are gathered once a step (grad) the forward pass of the first. Where a unit's gradients are
// reduced twice, within the node and across nodes, the last unit's are both exposed. Matrices that
// travel to their owners and back after the sum of loss and norm have the update beside them. Where
// the copy engines move anything, all ranks wait for the slowest GPU (`machine.spread`).
StepEstimate estimate_step(const Traffic& traffic, double compute, const MachineConfig& machine,
                           const StepShape& shape = {});

}  // namespace sbtrain
