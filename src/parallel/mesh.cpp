#include "parallel/mesh.h"

#include "core/error.h"

namespace sbtrain {

Mesh::Mesh(Communicator& world, Sharding sharding, int node_size, int context)
    : world_(world), sharding_(sharding) {
  if (context < 1 || world.world() % context != 0) {
    fail(ExitCode::kConfig,
         "train.context_parallel: {} ranks share a sequence, but the {} of the job are no multiple "
         "of that",
         context, world.world());
  }
  if (world.world() == 1) return;
  if (sharding == Sharding::kNone) node_size = 1;
  if (sharding == Sharding::kFull || sharding == Sharding::kGrad) node_size = world.world();
  if (node_size < 1 || world.world() % node_size != 0) {
    fail(ExitCode::kConfig,
         "train.sharding: hybrid needs the same number of ranks on every node, but {} ranks are no "
         "multiple of {}; use full",
         world.world(), node_size);
  }
  if (context > 1) context_ = world.split([=](int rank) { return rank / context; });
  if (node_size == world.world()) return;
  shards_ = world.split([=](int rank) { return rank / node_size; });
  replicas_ = world.split([=](int rank) { return rank % node_size; });
}

Communicator* Mesh::group(MeshDimension dimension) const {
  switch (dimension) {
    case MeshDimension::kShards:
      return &shards();
    case MeshDimension::kReplicas:
      return replicas_.get();
    case MeshDimension::kContext:
      return context_.get();
  }
  fail(ExitCode::kInternal, "the mesh has no dimension {}", static_cast<int>(dimension));
}

int Mesh::size(MeshDimension dimension) const {
  const Communicator* ranks = group(dimension);
  return ranks ? ranks->world() : 1;
}

int Mesh::place(MeshDimension dimension) const {
  const Communicator* ranks = group(dimension);
  return ranks ? ranks->rank() : 0;
}

}  // namespace sbtrain
