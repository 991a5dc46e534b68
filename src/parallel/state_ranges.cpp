#include "parallel/state_ranges.h"

#include <algorithm>

namespace sbtrain {
namespace {

// The ranges of the whole unit.
std::vector<StateRange> ranges_of(const ParamUnit& unit, const Optimizer& optimizer) {
  std::vector<StateRange> ranges;
  const auto end = [&] { return ranges.empty() ? 0 : ranges.back().end(); };
  for (const PlacedTensor& tensor : unit.tensors) {
    const bool matrix = optimizer.takes_matrix(tensor.spec);
    const std::vector<std::string> names = optimizer.states(tensor.spec);
    const bool flat_before = !ranges.empty() && ranges.back().matrix == nullptr;
    const bool goes_on = flat_before && !matrix && ranges.back().names == names &&
                         ranges.back().lr_factor == tensor.spec.lr_factor;
    if (flat_before && !goes_on) ranges.back().size = tensor.offset - ranges.back().begin;
    if (!goes_on) {
      const int64_t begin = matrix ? tensor.offset : end();
      ranges.push_back({.begin = begin,
                        .matrix = matrix ? &tensor : nullptr,
                        .names = names,
                        .lr_factor = tensor.spec.lr_factor});
    }
    ranges.back().size = tensor.offset + tensor.stored - ranges.back().begin;
  }
  if (!ranges.empty() && ranges.back().matrix == nullptr)
    ranges.back().size = unit.size - ranges.back().begin;
  return ranges;
}

// The elements with weight decay among storage elements [begin, end) of the unit, counted from
// `begin`; adjacent ranges are joined.
std::vector<ops::DecayRange> decay_ranges(const ParamUnit& unit, int64_t begin, int64_t end) {
  std::vector<ops::DecayRange> ranges;
  for (const PlacedTensor& tensor : unit.tensors) {
    const int64_t first = std::max(tensor.offset, begin);
    const int64_t last = std::min(tensor.offset + tensor.stored, end);
    if (!tensor.spec.decay || first >= last) continue;
    if (!ranges.empty() && ranges.back().end == first - begin) {
      ranges.back().end = last - begin;
    } else {
      ranges.push_back({first - begin, last - begin});
    }
  }
  return ranges;
}

}  // namespace

std::vector<StateRange> state_ranges(const ParamUnit& unit, const Optimizer& optimizer,
                                     int64_t begin, int64_t size) {
  std::vector<StateRange> ranges;
  for (StateRange& range : ranges_of(unit, optimizer)) {
    const int64_t first = std::max(range.begin, begin);
    const int64_t last = std::min(range.end(), begin + size);
    if (first >= last) continue;
    range.begin = first - begin;
    range.size = last - first;
    range.decays = decay_ranges(unit, first, last);
    ranges.push_back(std::move(range));
  }
  return ranges;
}

}  // namespace sbtrain
