#include "model/params.h"

#include <algorithm>

#include "core/error.h"
#include "core/philox.h"
#include "ops/initialize.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

constexpr int64_t kTensorAlignment = 64;  // elements: 128 bytes in bf16

// More elements than any block or embedding has. The bound keeps sums over all units far inside 64
// bits, with several values for each element.
constexpr int64_t kLargestUnit = int64_t{1} << 46;

int64_t product(const std::vector<int64_t>& dims) {
  int64_t n = 1;
  for (const int64_t d : dims) n *= d;
  return n;
}

int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

struct Columns {
  int64_t logical;  // elements of a logical row
  int64_t stored;   // elements of a storage row
};

Columns columns(const TensorSpec& spec) {
  return {product(spec.shape) / spec.shape[0], product(spec.stored()) / spec.stored()[0]};
}

}  // namespace

int ParamRegistry::add_unit(std::string prefix, const std::vector<TensorSpec>& tensors) {
  ParamUnit unit;
  unit.prefix = std::move(prefix);
  for (const TensorSpec& spec : tensors) {
    require(spec.shape.size() == spec.stored().size(), "'{}': shape and storage differ in rank",
            spec.name);
    PlacedTensor placed;
    placed.spec = spec;
    placed.name = unit.prefix + spec.name;
    placed.offset = spec.fused ? unit.size : round_up(unit.size, kTensorAlignment);
    placed.count = product(spec.shape);
    placed.stored = product(spec.stored());
    unit.size = placed.offset + placed.stored;
    unit.tensors.push_back(std::move(placed));
  }
  unit.size = round_up(unit.size, alignment_);
  if (unit.size > kLargestUnit) {
    fail(ExitCode::kConfig,
         "the weights '{}*' would have {} elements, more than 2^46: lower model.width, model.inner "
         "or model.vocab",
         unit.prefix, unit.size);
  }
  units_.push_back(std::move(unit));
  return static_cast<int>(units_.size()) - 1;
}

int64_t ParamRegistry::count() const {
  int64_t n = 0;
  for (const ParamUnit& unit : units_) {
    for (const PlacedTensor& tensor : unit.tensors) n += tensor.count;
  }
  return n;
}

int64_t ParamRegistry::storage() const {
  int64_t n = 0;
  for (const ParamUnit& unit : units_) n += unit.size;
  return n;
}

std::vector<ElementRange> summed_ranges(const ParamUnit& unit) {
  std::vector<ElementRange> ranges;
  int64_t begin = 0;  // of the range that the next product ends
  for (const PlacedTensor& tensor : unit.tensors) {
    if (!tensor.spec.one_product) continue;
    if (begin < tensor.offset) ranges.push_back({begin, tensor.offset});
    begin = tensor.offset + tensor.stored;
  }
  if (begin < unit.size) ranges.push_back({begin, unit.size});
  return ranges;
}

std::vector<Fp8Range> fp8_ranges(const ParamUnit& unit) {
  std::vector<Fp8Range> ranges;
  for (size_t i = 0; i < unit.tensors.size();) {
    const PlacedTensor& first = unit.tensors[i];
    Fp8Range range{{.begin = first.offset}, first.spec.name};
    bool taken = true;
    do {
      const PlacedTensor& tensor = unit.tensors[i++];
      taken = taken && takes_fp8(tensor.spec);
      range.end = tensor.offset + tensor.stored;
      if (!taken) continue;
      range.rows += tensor.spec.stored()[0];
      range.cols = tensor.spec.stored()[1];
    } while (i < unit.tensors.size() && unit.tensors[i].spec.fused);
    if (taken) ranges.push_back(std::move(range));
  }
  return ranges;
}

Weights ParamRegistry::view(int index, const Tensor& flat, bool fresh) const {
  Weights weights;
  for (const PlacedTensor& tensor : unit(index).tensors) {
    const Tensor range = flat.row_range(tensor.offset, tensor.stored);
    weights.add(tensor.spec.name, Tensor(range.data, range.dtype, tensor.spec.stored()),
                fresh && tensor.spec.one_product);
  }
  return weights;
}

void for_each_run(const PlacedTensor& tensor, int64_t begin, int64_t end,
                  const std::function<void(const ElementRun&)>& visit) {
  begin = std::max<int64_t>(begin, 0);
  end = std::min(end, tensor.stored);
  if (begin >= end) return;
  const Columns cols = columns(tensor.spec);
  if (cols.logical == cols.stored) {  // no padding between rows: one run
    end = std::min(end, tensor.count);
    if (begin < end) visit({begin, begin, end - begin});
    return;
  }
  const int64_t rows = tensor.spec.shape[0];
  for (int64_t row = begin / cols.stored; row < rows && row * cols.stored < end; ++row) {
    const int64_t from = std::max<int64_t>(begin - row * cols.stored, 0);
    const int64_t to = std::min(end - row * cols.stored, cols.logical);
    if (from < to) visit({row * cols.stored + from, row * cols.logical + from, to - from});
  }
}

LogicalRange logical_range(const PlacedTensor& tensor, int64_t begin, int64_t end) {
  // The first logical element at or after a storage position.
  const auto logical_at = [&](int64_t position) {
    position = std::clamp<int64_t>(position, 0, tensor.stored);
    const Columns cols = columns(tensor.spec);
    const int64_t row = std::min(position / cols.stored, tensor.spec.shape[0]);
    if (row == tensor.spec.shape[0]) return tensor.count;
    return row * cols.logical + std::min(position % cols.stored, cols.logical);
  };
  return {logical_at(begin), logical_at(end)};
}

void initialize(const ParamUnit& unit, int64_t begin, uint64_t seed, Stream& s, const Tensor& x_N) {
  const int64_t end = begin + x_N.numel();
  ops::run(s, ops::Fill{.x = x_N, .value = 0.0f});  // the gaps between tensors
  for (const PlacedTensor& tensor : unit.tensors) {
    const int64_t first = std::max(begin, tensor.offset);
    const int64_t last = std::min(end, tensor.offset + tensor.stored);
    if (first >= last) continue;
    const Columns cols = columns(tensor.spec);
    ops::run(s, ops::Initialize{.x_N = x_N.row_range(first - begin, last - first),
                                .begin = first - tensor.offset,
                                .rows = tensor.spec.shape[0],
                                .cols = cols.logical,
                                .stored_cols = cols.stored,
                                .init = tensor.spec.init,
                                .random = Philox(seed, RandomPurpose::kInit, tensor.name)});
  }
}

}  // namespace sbtrain
