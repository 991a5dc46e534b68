// How the ranks of a run divide a model: a mesh with named dimensions. A rank has a place in each,
// and those that differ in one place alone form a group with collectives of its own.
//
//   shards     ranks that together hold the model
//   replicas   ranks that hold the same shard
//
// Beside that, N consecutive ranks share sequences (train.context_parallel):
//
//   context    ranks that hold parts of the same micro-batches, in the order of their tokens
//
// They hold the model as all other ranks do: weights are spread over them, and gradients are summed
// over them, in the first two dimensions, of which the product is the world.
//
//   mode     ranks that share one copy (shards)   copies (replicas)   weights between their uses
//   full     all                                  1                   a shard        (ZeRO-3, FSDP)
//   grad     all                                  1                   whole          (ZeRO-2)
//   none     1                                    every rank          whole          (DDP)
//   hybrid   those of a node                      every node          a shard        (HSDP)
//
// ZeRO: arXiv 1910.02054. Master weights, gradients and moments are sharded wherever weights are.
#pragma once

#include <memory>

#include "parallel/communicator.h"
#include "parallel/sharding.h"

namespace sbtrain {

enum class MeshDimension : uint8_t { kShards, kReplicas, kContext };

class Mesh {
 public:
  // Collective, since it may split `world`, which must outlive the mesh. `node_size` is the number
  // of ranks of a node, which must divide the world with Sharding::kHybrid (else
  // ExitCode::kConfig); consecutive ranks share a node.
  // `context` ranks share sequences; they must divide the world (else ExitCode::kConfig).
  explicit Mesh(Communicator& world, Sharding sharding = Sharding::kFull, int node_size = 1,
                int context = 1);

  Communicator& world() const { return world_; }

  // The ranks that differ from this one in the dimension alone, itself included; null: itself alone
  // and no collectives are needed. The shards have a communicator in any case.
  Communicator* group(MeshDimension dimension) const;
  int size(MeshDimension dimension) const;   // at least 1
  int place(MeshDimension dimension) const;  // of this rank, 0 <= place < size

  // The ranks whose shards together are the model. This rank owns the shard of its rank there.
  Communicator& shards() const { return shards_ ? *shards_ : world_; }
  // The ranks that hold the same shard as this one, or null if there are no others.
  Communicator* replicas() const { return replicas_.get(); }

  // The ranks that hold parts of the same micro-batches, or null if each has whole ones.
  Communicator* context() const { return context_.get(); }
  // Who takes which micro-batches: ranks of the same number the same ones.
  int data_rank() const { return world_.rank() / size(MeshDimension::kContext); }
  int data_ranks() const { return world_.world() / size(MeshDimension::kContext); }

  int shard_count() const { return shards().world(); }
  // Whether units must be gathered before they are used.
  bool sharded() const { return shard_count() > 1; }
  // Whether whole weights are kept from one update to the next.
  bool keeps_weights() const { return sharding_ == Sharding::kGrad; }
  // Whether this rank's shard is the one that is counted; replicas are equal to it.
  bool first_replica() const { return !replicas_ || replicas_->rank() == 0; }

 private:
  Communicator& world_;
  Sharding sharding_;
  std::unique_ptr<Communicator> shards_;    // null: the world
  std::unique_ptr<Communicator> replicas_;  // null: this rank alone
  std::unique_ptr<Communicator> context_;   // null: this rank alone
};

}  // namespace sbtrain
