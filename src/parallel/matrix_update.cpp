#include "parallel/matrix_update.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "core/error.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

constexpr int64_t kPieceAlignment = 64;  // elements

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

// Deals the matrices out, the costliest first, each to the rank with the least work. Among equals
// the one is taken whose parts would stay the shortest. Returns the most work of a rank.
double choose_owners(std::vector<Matrix>& matrices, const ParamRegistry& registry,
                     const MatrixRanks& ranks) {
  std::vector<Matrix*> order;
  for (Matrix& matrix : matrices) order.push_back(&matrix);
  std::stable_sort(order.begin(), order.end(),
                   [](const Matrix* a, const Matrix* b) { return a->flops > b->flops; });
  std::vector<double> work(static_cast<size_t>(ranks.shards * ranks.replicas), 0.0);
  Parts used;
  for (Matrix* matrix : order) {
    const auto pieces = pieces_of(*matrix, registry.unit(matrix->unit), ranks.shards);
    const double least = *std::ranges::min_element(work);
    int64_t shortest = INT64_MAX;
    size_t chosen = 0;
    for (size_t rank = 0; rank < work.size(); ++rank) {
      if (work[rank] > least) continue;
      const int replica = static_cast<int>(rank) / ranks.shards;
      const int owner = static_cast<int>(rank) % ranks.shards;
      int64_t longest = 0;
      for (const Piece& piece : pieces) {
        longest = std::max(longest, used.with(replica, piece.shard, owner, piece.size));
      }
      if (longest >= shortest) continue;
      shortest = longest;
      chosen = rank;
    }
    matrix->replica = static_cast<int>(chosen) / ranks.shards;
    matrix->owner = static_cast<int>(chosen) % ranks.shards;
    work[chosen] += matrix->flops;
    for (const Piece& piece : pieces) {
      used.add(matrix->replica, piece.shard, matrix->owner, piece.size);
    }
  }
  return *std::ranges::max_element(work);
}

MatrixGroup make_group(int begin, int end, std::vector<Matrix>& matrices,
                       const ParamRegistry& registry, const MatrixRanks& ranks) {
  MatrixGroup group{.begin = begin, .end = end};
  group.flops = choose_owners(matrices, registry, ranks);
  Parts parts;
  for (const Matrix& matrix : matrices) {
    OwnedMatrix owned{.tensor = matrix.tensor};
    for (const Piece& piece : pieces_of(matrix, registry.unit(matrix.unit), ranks.shards)) {
      const int64_t offset = parts.add(matrix.replica, piece.shard, matrix.owner, piece.size);
      owned.sources.push_back(
          {.shard = piece.shard, .offset = offset, .begin = piece.begin, .size = piece.size});
      if (piece.shard != ranks.shard) continue;
      group.pieces.push_back({.unit = matrix.unit,
                              .tensor = matrix.tensor,
                              .replica = matrix.replica,
                              .owner = matrix.owner,
                              .offset = offset,
                              .size = piece.size});
    }
    if (matrix.replica == ranks.replica && matrix.owner == ranks.shard) {
      group.owned.push_back(std::move(owned));
    }
  }
  group.part = parts.longest();
  return group;
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
  // At least two groups, so that one travels beside the work on the other.
  const int world = ranks.shards * ranks.replicas;
  const int count = std::max((with_matrices + world - 1) / world, std::min(with_matrices, 2));
  const int size = (with_matrices + count - 1) / count;
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
  int64_t part = 0;
  for (const MatrixGroup& group : groups_) part = std::max(part, group.part);
  const size_t in_flight = std::min<size_t>(kMatrixGroupsInFlight, groups_.size());
  for (size_t i = 0; i < in_flight; ++i) ring_.push_back(allocate(part));
}

MatrixUpdate::Arrays MatrixUpdate::allocate(int64_t part) {
  const auto array = [&](const char* name, int64_t parts) {
    return compute_.allocate(MemoryClass::kOptimizer, name, compute_.memory().compute_dtype(),
                             {parts * part});
  };
  const int64_t shards = ranks_.shards;
  Arrays arrays{.there = array("parts of matrices", shards), .here = {}, .all = {}};
  if (mesh_.sharded()) arrays.here = array("parts of owned matrices", shards);
  if (mesh_.replicas()) arrays.all = array("parts of all replicas", ranks_.replicas * shards);
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
  if (ring_.empty()) flight.own = allocate(group.part);
  const Arrays& arrays = ring_.empty() ? flight.own : ring_[next_++ % ring_.size()];
  const auto first = [&](const Buffer& x, int64_t count) {
    return x.tensor().defined() ? x.tensor().row_range(0, count) : Tensor();
  };
  flight.there = first(arrays.there, size);
  flight.here = first(arrays.here, size);
  flight.all = first(arrays.all, ranks_.replicas * size);
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
  if (Communicator* replicas = mesh_.replicas()) {
    replicas->all_gather(*communication_, flight.all, flight.there);
  }
  communication_->record(flight.back);
}

const MatrixGroup& MatrixUpdate::apply(const UpdateInputs& in) {
  require(!flights_.empty() && flights_.front().transformed,
          "matrices are applied before they are transformed");
  Flight& flight = flights_.front();
  const MatrixGroup& group = *flight.group;
  if (communication_ != nullptr) waits_.wait(flight.back);
  const bool replicas = mesh_.replicas() != nullptr;
  const Tensor& whole = replicas ? flight.all : flight.there;
  for (size_t i = 0; i < group.pieces.size(); ++i) {
    const MatrixPiece& piece = group.pieces[i];
    const int64_t rank = replicas ? piece.replica * ranks_.shards + piece.owner : piece.owner;
    flight.parts[i].travels = whole.row_range(rank * group.part + piece.offset, piece.size);
  }
  optimizer_.apply(compute_, in, flight.parts);
  flights_.pop_front();
  return group;
}

}  // namespace sbtrain
