#include "parallel/matrix_update.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

constexpr int64_t kPieceAlignment = 64;  // elements

// Of matrices that only have to be gathered: what is done before the first leaves, and after the
// last has come, is done while nothing travels.
constexpr int kLeastGroupsBySize = 4;

struct Matrix {
  int unit = 0;
  const PlacedTensor* tensor = nullptr;
  double flops = 0;
  int replica = 0, owner = 0;
};

// The elements of a matrix that lie in a rank's shard, from the start of the matrix.
struct Piece {
  int shard = 0;
  int64_t begin = 0, size = 0;
};
std::vector<Piece> pieces_of(const Matrix& matrix, const ParamUnit& unit, int shards) {
  const int64_t size = unit.size / shards;
  const int64_t first = matrix.tensor->offset;
  const int64_t last = first + matrix.tensor->stored;
  std::vector<Piece> pieces;
  for (int64_t shard = first / size; shard * size < last; ++shard) {
    const int64_t begin = std::max(first, shard * size);
    const int64_t end = std::min(last, (shard + 1) * size);
    pieces.push_back(
        {.shard = static_cast<int>(shard), .begin = begin - first, .size = end - begin});
  }
  return pieces;
}

// Of Parts that hold what all owners of a replica give.
constexpr int kAnyOwner = 0;

// The first of so many for which `cost` is the least.
template <typename Cost>
int first_of_least(int count, const Cost& cost) {
  int chosen = 0;
  auto least = cost(0);
  for (int i = 1; i < count; ++i) {
    const auto other = cost(i);
    if (!(other < least)) continue;
    least = other;
    chosen = i;
  }
  return chosen;
}

// How full the parts are that travel between two ranks of a replica.
class Parts {
 public:
  // What a part would hold with `size` more elements.
  int64_t with(int replica, int from, int to, int64_t size) const {
    const auto found = used_.find({replica, from, to});
    return (found == used_.end() ? 0 : found->second) + rounded(size);
  }
  // Where the elements begin that are added.
  int64_t add(int replica, int from, int to, int64_t size) {
    int64_t& used = used_[{replica, from, to}];
    const int64_t offset = used;
    used += rounded(size);
    longest_ = std::max(longest_, used);
    return offset;
  }
  int64_t longest() const { return longest_; }

 private:
  static int64_t rounded(int64_t size) {
    return (size + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
  }
  std::map<std::tuple<int, int, int>, int64_t> used_;
  int64_t longest_ = 0;
};

// Deals the matrices out, the costliest first: each to the replica that would have the least to
// gather from a shard, and there to the rank with the least work. Among equals the replica with the
// least work is taken, and the rank whose parts would stay the shortest. Returns the most work of a
// rank.
double choose_owners(std::vector<Matrix>& matrices, const ParamRegistry& registry,
                     const MatrixRanks& ranks) {
  std::vector<Matrix*> order;
  for (Matrix& matrix : matrices) order.push_back(&matrix);
  std::stable_sort(order.begin(), order.end(),
                   [](const Matrix* a, const Matrix* b) { return a->flops > b->flops; });
  std::vector<double> of_replica(static_cast<size_t>(ranks.replicas), 0.0);
  std::vector<double> work(static_cast<size_t>(ranks.shards * ranks.replicas), 0.0);
  const auto rank = [&](int replica, int owner) {
    return static_cast<size_t>(replica * ranks.shards + owner);
  };
  Parts used, gathered;
  for (Matrix* matrix : order) {
    const auto pieces = pieces_of(*matrix, registry.unit(matrix->unit), ranks.shards);
    const auto longest = [&](const Parts& parts, int replica, int owner) {
      int64_t most = 0;
      for (const Piece& piece : pieces) {
        most = std::max(most, parts.with(replica, piece.shard, owner, piece.size));
      }
      return most;
    };
    matrix->replica = first_of_least(ranks.replicas, [&](int replica) {
      return std::pair(longest(gathered, replica, kAnyOwner), of_replica[replica]);
    });
    matrix->owner = first_of_least(ranks.shards, [&](int owner) {
      return std::pair(work[rank(matrix->replica, owner)], longest(used, matrix->replica, owner));
    });
    of_replica[matrix->replica] += matrix->flops;
    work[rank(matrix->replica, matrix->owner)] += matrix->flops;
    for (const Piece& piece : pieces) {
      used.add(matrix->replica, piece.shard, matrix->owner, piece.size);
      gathered.add(matrix->replica, piece.shard, kAnyOwner, piece.size);
    }
  }
  return *std::ranges::max_element(work);
}

MatrixGroup make_group(int begin, int end, std::vector<Matrix>& matrices,
                       const ParamRegistry& registry, const MatrixRanks& ranks) {
  MatrixGroup group{.begin = begin, .end = end, .complete_begin = begin, .complete_end = end};
  group.flops = choose_owners(matrices, registry, ranks);
  Parts parts, gathered;
  for (const Matrix& matrix : matrices) {
    OwnedMatrix owned{.tensor = matrix.tensor};
    for (const Piece& piece : pieces_of(matrix, registry.unit(matrix.unit), ranks.shards)) {
      const int64_t offset = parts.add(matrix.replica, piece.shard, matrix.owner, piece.size);
      const int64_t among_replicas =
          gathered.add(matrix.replica, piece.shard, kAnyOwner, piece.size);
      owned.sources.push_back(
          {.shard = piece.shard, .offset = offset, .begin = piece.begin, .size = piece.size});
      if (piece.shard != ranks.shard) continue;
      group.pieces.push_back({.unit = matrix.unit,
                              .tensor = matrix.tensor,
                              .replica = matrix.replica,
                              .owner = matrix.owner,
                              .offset = offset,
                              .gathered = among_replicas,
                              .size = piece.size});
    }
    if (matrix.replica == ranks.replica && matrix.owner == ranks.shard) {
      group.owned.push_back(std::move(owned));
    }
  }
  group.part = parts.longest();
  group.gathered = gathered.longest();
  return group;
}

// At most `count` groups of about the same size for ranks that hold whole matrices: the largest
// matrices first, in rounds of one for each rank.
std::vector<MatrixGroup> groups_by_size(std::vector<Matrix> matrices, int count,
                                        const ParamRegistry& registry, const MatrixRanks& ranks) {
  std::stable_sort(matrices.begin(), matrices.end(), [](const Matrix& a, const Matrix& b) {
    return a.tensor->stored > b.tensor->stored;
  });
  int64_t elements = 0;
  for (const Matrix& matrix : matrices) elements += matrix.tensor->stored;
  std::vector<std::vector<Matrix>> dealt;
  int64_t of_group = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const bool new_round = i % static_cast<size_t>(ranks.replicas) == 0;
    if (i == 0 || (new_round && of_group * count >= elements)) {
      dealt.emplace_back();
      of_group = 0;
    }
    dealt.back().push_back(matrices[i]);
    of_group += matrices[i].tensor->stored;
  }
  const auto units = static_cast<int>(registry.units().size());
  const auto size = static_cast<int>(dealt.size());
  std::vector<MatrixGroup> groups;
  for (int g = 0; g < size; ++g) {
    groups.push_back(
        make_group(units * g / size, units * (g + 1) / size, dealt[g], registry, ranks));
    groups.back().complete_begin = groups.back().complete_end = 0;
  }
  groups.back().complete_end = units;
  return groups;
}

}  // namespace

MatrixRanks ranks_of(const Mesh& mesh) {
  return {.shards = mesh.size(MeshDimension::kShards),
          .shard = mesh.place(MeshDimension::kShards),
          .replicas = mesh.size(MeshDimension::kReplicas),
          .replica = mesh.place(MeshDimension::kReplicas)};
}

std::vector<MatrixGroup> plan_matrices(const ParamRegistry& registry, const Optimizer& optimizer,
                                       const MatrixRanks& ranks) {
  const auto units = static_cast<int>(registry.units().size());
  std::vector<std::vector<Matrix>> of_unit(registry.units().size());
  int with_matrices = 0;
  for (int u = 0; u < units; ++u) {
    for (const PlacedTensor& tensor : registry.unit(u).tensors) {
      if (!optimizer.takes_matrix(tensor.spec)) continue;
      of_unit[u].push_back(
          {.unit = u, .tensor = &tensor, .flops = optimizer.transform_flops(tensor.spec)});
    }
    with_matrices += of_unit[u].empty() ? 0 : 1;
  }
  if (with_matrices == 0) return {};
  const int world = ranks.shards * ranks.replicas;
  const auto count_of = [&](int least) {
    return std::max((with_matrices + world - 1) / world, std::min(with_matrices, least));
  };
  if (ranks.shards == 1 && ranks.replicas > 1) {
    std::vector<Matrix> all;
    for (const std::vector<Matrix>& some : of_unit) all.insert(all.end(), some.begin(), some.end());
    return groups_by_size(std::move(all), count_of(kLeastGroupsBySize), registry, ranks);
  }
  // At least two groups, so that one travels beside the work on the other.
  const int count = count_of(2);
  int size = (with_matrices + count - 1) / count;
  // As many of each kind for every replica, so that a gather has no padding.
  const int even = (size + ranks.replicas - 1) / ranks.replicas * ranks.replicas;
  if (even < with_matrices) size = even;
  std::vector<MatrixGroup> groups;
  std::vector<Matrix> matrices;
  int begin = 0, taken = 0;
  for (int u = 0; u < units; ++u) {
    if (!of_unit[u].empty() && taken == size) {
      groups.push_back(make_group(begin, u, matrices, registry, ranks));
      matrices.clear();
      begin = u;
      taken = 0;
    }
    matrices.insert(matrices.end(), of_unit[u].begin(), of_unit[u].end());
    taken += of_unit[u].empty() ? 0 : 1;
  }
  groups.push_back(make_group(begin, units, matrices, registry, ranks));
  return groups;
}

MatrixUpdate::MatrixUpdate(const ParamRegistry& registry, const Optimizer& optimizer,
                           const Mesh& mesh, Stream& compute, Stream* communication,
                           WaitTimes& waits)
    : optimizer_(optimizer),
      mesh_(mesh),
      compute_(compute),
      communication_(communication),
      waits_(waits),
      ranks_(ranks_of(mesh)),
      groups_(plan_matrices(registry, optimizer, ranks_)) {
  if (communication_ == nullptr || groups_.empty()) return;
  int64_t part = 0, gathered = 0;
  for (const MatrixGroup& group : groups_) {
    part = std::max(part, group.part);
    gathered = std::max(gathered, group.gathered);
  }
  const size_t in_flight = std::min<size_t>(kMatrixGroupsInFlight, groups_.size());
  for (size_t i = 0; i < in_flight; ++i) ring_.push_back(allocate(part, gathered));
}

MatrixUpdate::Arrays MatrixUpdate::allocate(int64_t part, int64_t gathered) {
  const auto array = [&](const char* name, int64_t elements) {
    return compute_.allocate(MemoryClass::kOptimizer, name, compute_.memory().compute_dtype(),
                             {elements});
  };
  const int64_t size = ranks_.shards * part;
  Arrays arrays{.there = array("parts of matrices", size), .here = {}, .own = {}, .all = {}};
  if (mesh_.sharded()) arrays.here = array("parts of owned matrices", size);
  if (mesh_.replicas() == nullptr) return arrays;
  if (mesh_.sharded()) arrays.own = array("parts of this replica", gathered);
  arrays.all = array("parts of all replicas", ranks_.replicas * gathered);
  return arrays;
}

// Collectives see, and may overwrite, what the compute stream was given before them.
void MatrixUpdate::start_communication() {
  Event now;
  compute_.record(now);
  communication_->wait(now);
}

void MatrixUpdate::send(const MatrixGroup& group, const UpdateInputs& in,
                        std::vector<MatrixView> parts) {
  Flight& flight = flights_.emplace_back();
  flight.group = &group;
  flight.parts = std::move(parts);
  const int64_t size = ranks_.shards * group.part;
  if (ring_.empty()) flight.alone = allocate(group.part, group.gathered);
  const Arrays& arrays = ring_.empty() ? flight.alone : ring_[next_++ % ring_.size()];
  const auto first = [&](const Buffer& x, int64_t count) {
    return x.tensor().defined() ? x.tensor().row_range(0, count) : Tensor();
  };
  flight.there = first(arrays.there, size);
  flight.here = first(arrays.here, size);
  flight.own = first(arrays.own, group.gathered);
  flight.all = first(arrays.all, ranks_.replicas * group.gathered);
  for (size_t i = 0; i < group.pieces.size(); ++i) {
    const MatrixPiece& piece = group.pieces[i];
    if (piece.replica != ranks_.replica) continue;
    flight.parts[i].travels =
        flight.there.row_range(piece.owner * group.part + piece.offset, piece.size);
  }
  optimizer_.direct(compute_, in, flight.parts);
  if (!mesh_.sharded()) return;
  start_communication();
  mesh_.shards().all_to_all(*communication_, flight.here, flight.there);
  communication_->record(flight.sent);
}

void MatrixUpdate::transform(Flight& flight, const OwnedMatrix& matrix) {
  const TensorSpec& spec = matrix.tensor->spec;
  const int64_t part = flight.group->part;
  const std::vector<int64_t>& shape = spec.stored();
  if (!mesh_.sharded()) {
    const OwnedMatrix::Source& source = matrix.sources.front();
    const Tensor x = flight.there.row_range(source.offset, source.size);
    return optimizer_.transform(compute_, spec, x.reshaped({shape[0], shape[1]}));
  }
  const Buffer x_N = compute_.allocate(MemoryClass::kOptimizer, "matrix",
                                       compute_.memory().compute_dtype(), {matrix.tensor->stored});
  // This rank's own part is still where it was sent from.
  const auto piece = [&](const Tensor& from, const OwnedMatrix::Source& source) {
    return from.row_range(source.shard * part + source.offset, source.size);
  };
  const auto place = [&](const OwnedMatrix::Source& source) {
    return x_N.tensor().row_range(source.begin, source.size);
  };
  for (const OwnedMatrix::Source& source : matrix.sources) {
    const bool mine = source.shard == ranks_.shard;
    ops::run(compute_,
             ops::Copy{.y = place(source), .x = piece(mine ? flight.there : flight.here, source)});
  }
  optimizer_.transform(compute_, spec, x_N.tensor().reshaped({shape[0], shape[1]}));
  for (const OwnedMatrix::Source& source : matrix.sources) {
    ops::run(compute_, ops::Copy{.y = piece(flight.here, source), .x = place(source)});
  }
}

void MatrixUpdate::transform() {
  const auto next = std::ranges::find(flights_, false, &Flight::transformed);
  require(next != flights_.end(), "matrices are transformed before they are sent");
  Flight& flight = *next;
  flight.transformed = true;
  if (mesh_.sharded()) waits_.wait(flight.sent);
  for (const OwnedMatrix& matrix : flight.group->owned) transform(flight, matrix);
  if (communication_ == nullptr) return;
  start_communication();
  const int64_t part = flight.group->part;
  if (mesh_.sharded()) {
    mesh_.shards().all_to_all(*communication_, flight.there, flight.here);
    const auto own = [&](const Tensor& x) { return x.row_range(ranks_.shard * part, part); };
    ops::run(*communication_, ops::Copy{.y = own(flight.there), .x = own(flight.here)});
  }
  if (mesh_.replicas()) gather(flight);
  communication_->record(flight.back);
}

// Of shards, what has come back from each owner is as long as the longest part, most of it padding.
void MatrixUpdate::gather(Flight& flight) {
  const MatrixGroup& group = *flight.group;
  if (mesh_.sharded()) {
    for (const MatrixPiece& piece : group.pieces) {
      if (piece.replica != ranks_.replica) continue;
      ops::run(*communication_,
               ops::Copy{.y = flight.own.row_range(piece.gathered, piece.size),
                         .x = flight.there.row_range(piece.owner * group.part + piece.offset,
                                                     piece.size)});
    }
  }
  mesh_.replicas()->all_gather(*communication_, flight.all,
                               mesh_.sharded() ? flight.own : flight.there);
}

const MatrixGroup& MatrixUpdate::apply(const UpdateInputs& in) {
  require(!flights_.empty() && flights_.front().transformed,
          "matrices are applied before they are transformed");
  Flight& flight = flights_.front();
  const MatrixGroup& group = *flight.group;
  if (communication_ != nullptr) waits_.wait(flight.back);
  const bool replicas = mesh_.replicas() != nullptr;
  for (size_t i = 0; i < group.pieces.size(); ++i) {
    const MatrixPiece& piece = group.pieces[i];
    flight.parts[i].travels =
        replicas ? flight.all.row_range(piece.replica * group.gathered + piece.gathered, piece.size)
                 : flight.there.row_range(piece.owner * group.part + piece.offset, piece.size);
  }
  by_rate(in, std::move(flight.parts),
          [&](const UpdateInputs& inputs, std::span<const MatrixView> same) {
            optimizer_.apply(compute_, inputs, same);
          });
  flights_.pop_front();
  return group;
}

}  // namespace sbtrain
