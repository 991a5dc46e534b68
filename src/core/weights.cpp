#include "core/weights.h"

#include <algorithm>

#include "core/error.h"
#include "core/fp8.h"

namespace sbtrain {

bool takes_fp8(const TensorSpec& spec) {
  const std::vector<int64_t>& stored = spec.stored();
  return spec.role == ParamRole::kLinear && stored.size() == 2 && stored[0] % kFp8Multiple == 0 &&
         stored[1] % kFp8Multiple == 0;
}

void Weights::set_fp8(std::string_view first, const Fp8Scaled& scaled) {
  const auto found =
      std::ranges::find_if(entries_, [&](const Entry& e) { return e.name == first; });
  require(found != entries_.end() && is_fp8(found->tensor.dtype), "'{}' is not in fp8", first);
  found->fp8 = scaled;
}

const Fp8Scaled* Weights::fp8(std::string_view first) const {
  const Entry& found = entry(first);
  return found.fp8 ? &*found.fp8 : nullptr;
}

void Weights::add(std::string name, const Tensor& tensor, bool fresh) {
  entries_.push_back({std::move(name), tensor, fresh});
}

void Weights::add(const Weights& others) {
  entries_.insert(entries_.end(), others.entries_.begin(), others.entries_.end());
}

bool Weights::has(std::string_view name) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& e) { return e.name == name; });
}

const Tensor& Weights::at(std::string_view name) const {
  return entry(name).tensor;
}

bool Weights::fresh(std::string_view name) const {
  return entry(name).fresh;
}

const Weights::Entry& Weights::entry(std::string_view name) const {
  for (const Entry& entry : entries_) {
    if (entry.name == name) return entry;
  }
  fail(ExitCode::kInternal, "no tensor '{}' in this unit", name);
}

Tensor Weights::fused(std::string_view first, int count) const {
  const auto begin = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& e) { return e.name == first; });
  require(entries_.end() - begin >= count, "there are not {} tensors from '{}' on", count, first);
  Tensor whole = begin->tensor;
  for (auto it = begin + 1; it != begin + count; ++it) {
    require(it->tensor.cols() == whole.cols(), "'{}' and '{}' differ in their number of columns",
            it->name, first);
    whole.shape[0] += it->tensor.rows();
  }
  return whole;
}

}  // namespace sbtrain
