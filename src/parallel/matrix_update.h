// The update of whole matrices, of which the ranks hold parts (optim/optimizer.h).
//
// Each matrix has one owner among all ranks. Units form groups, whose matrices are dealt out so
// that all owners have about the same work. For a group, every rank sends its parts of the matrices
// to their owners by one all-to-all among the ranks that share the model's shards, the owners
// transform their matrices, and a second all-to-all brings the parts back. Where there are replicas
// of the shards, each replica does this for its share of the matrices, and an all-gather among the
// replicas, of what lies in a shard without gaps, brings them what the others have made: every rank
// applies the same bits.
//
// An all-to-all has parts of equal size, as long as the longest needs. The groups are as large as
// the world, if there are so many units, because matrices of the same kind lie in the same place of
// each unit: with as many of each kind as there are owners, every rank has about as much for each
// owner. Where every replica holds whole matrices (mode none), a group takes matrices of equal size
// instead, from any unit: with one for each owner, the gather has no padding. Groups follow each
// other as a pipeline: while one travels, the elements of the next are updated, and the matrices of
// the one before it are transformed.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "model/params.h"
#include "optim/optimizer.h"
#include "parallel/mesh.h"
#include "parallel/wait_times.h"

namespace sbtrain {

// The place of a rank, and the ranks there are.
struct MatrixRanks {
  int shards = 1, shard = 0;
  int replicas = 1, replica = 0;
};

// The part of a matrix that this rank's shard holds.
struct MatrixPiece {
  int unit = 0;
  const PlacedTensor* tensor = nullptr;
  int replica = 0, owner = 0;  // the owner's replica, and its shard
  int64_t offset = 0;          // elements, in the part that goes to the owner
  int64_t gathered = 0;        // the same in what the owner's replica gives the others
  int64_t size = 0;
};

// A matrix that this rank owns, and where its pieces come from.
struct OwnedMatrix {
  struct Source {
    int shard = 0;
    int64_t offset = 0;  // in the part that comes from it
    int64_t begin = 0;   // stored elements of the matrix
    int64_t size = 0;
  };
  const PlacedTensor* tensor = nullptr;
  std::vector<Source> sources{};
};

struct MatrixGroup {
  int begin = 0, end = 0;  // units whose other elements are updated while the group travels
  // Units whose last matrices it has: after it they are updated as a whole.
  int complete_begin = 0, complete_end = 0;
  int64_t part = 0;      // elements that travel between two ranks, padding included
  int64_t gathered = 0;  // that a rank gives those of the other replicas, padding included
  double flops = 0;      // of the owner that has the most to do, for which all others wait
  std::vector<MatrixPiece> pieces{};
  std::vector<OwnedMatrix> owned{};
};

MatrixRanks ranks_of(const Mesh& mesh);

// The groups, which together hold all units, for one rank. All ranks find the same owners.
std::vector<MatrixGroup> plan_matrices(const ParamRegistry& registry, const Optimizer& optimizer,
                                       const MatrixRanks& ranks);

// Groups that are under way at once: one travels to its owners, one is transformed, and one travels
// back.
inline constexpr int kMatrixGroupsInFlight = 3;

class MatrixUpdate {
 public:
  // What it is given must outlive it. `communication` is null in a world of one.
  MatrixUpdate(const ParamRegistry& registry, const Optimizer& optimizer, const Mesh& mesh,
               Stream& compute, Stream* communication, WaitTimes& waits);

  const std::vector<MatrixGroup>& groups() const { return groups_; }

  // The three steps of a group, in the order of groups; each may be called for a group before the
  // step before it is called for the next. `parts` are this rank's pieces of the group, in their
  // order, and `travels` is filled in here.
  void send(const MatrixGroup& group, const UpdateInputs& in, std::vector<MatrixView> parts);
  // Of the oldest group that has been sent and not transformed.
  void transform();
  // Of the oldest one that has been transformed; returns it.
  const MatrixGroup& apply(const UpdateInputs& in);

 private:
  // What a group needs on its way, in the compute type: `there` holds what leaves this rank,
  // [shards, part], and in the end what has come back to it; `here` what it owns, by the shards
  // that it belongs to; `own` what has come back to it, [gathered], where there are replicas of
  // shards; `all` what has come back to all replicas, [replicas, gathered].
  struct Arrays {
    Buffer there, here, own, all;
  };
  struct Flight {
    const MatrixGroup* group = nullptr;
    std::vector<MatrixView> parts;
    Arrays alone;  // of a rank that is alone
    Tensor there, here, own, all;
    bool transformed = false;
    Event sent, back;
  };
  Arrays allocate(int64_t part, int64_t gathered);
  void start_communication();
  void gather(Flight& flight);
  void transform(Flight& flight, const OwnedMatrix& matrix);

  const Optimizer& optimizer_;
  const Mesh& mesh_;
  Stream& compute_;
  Stream* communication_;
  WaitTimes& waits_;
  const MatrixRanks ranks_;
  const std::vector<MatrixGroup> groups_;
  // Of the groups that are under way at once. They stay from step to step: collectives may need
  // the same places on all ranks, and in a program, where each transforms matrices of its own,
  // places differ.
  std::vector<Arrays> ring_;
  size_t next_ = 0;
  std::deque<Flight> flights_;
};

}  // namespace sbtrain
