#include "data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace sbtrain {
namespace {

__extension__ using Wide = __int128;
constexpr int64_t kUnit = int64_t{1} << 32;

}  // namespace

Mixture::Mixture(const std::vector<double>& weights)
    : Mixture(weights, std::vector<int64_t>(weights.size(), 0)) {}

Mixture::Mixture(const std::vector<double>& weights, std::vector<int64_t> taken)
    : taken_(std::move(taken)) {
  require(weights.size() == taken_.size(), "mixture: {} weights, {} counts", weights.size(),
          taken_.size());
  if (weights.empty()) fail(ExitCode::kConfig, "data.sources: a mixture needs a source");
  double sum = 0;
  for (const double weight : weights) {
    if (!(weight > 0) || !std::isfinite(weight)) {
      fail(ExitCode::kConfig, "data.sources: weight {} must be positive and finite", weight);
    }
    sum += weight;
  }
  for (const double weight : weights) {
    shares_.push_back(std::max<int64_t>(1, std::llround(weight / sum * kUnit)));
  }
  total_ = std::accumulate(taken_.begin(), taken_.end(), int64_t{0});
}

int Mixture::pick(int64_t row_tokens) const {
  int best = 0;
  Wide best_deficit = 0;
  for (size_t i = 0; i < shares_.size(); ++i) {
    const Wide deficit = static_cast<Wide>(shares_[i]) * (total_ + row_tokens) -
                         static_cast<Wide>(taken_[i]) * kUnit;
    if (i == 0 || deficit > best_deficit) {
      best = static_cast<int>(i);
      best_deficit = deficit;
    }
  }
  return best;
}

void Mixture::add(int source, int64_t tokens) {
  taken_[static_cast<size_t>(source)] += tokens;
  total_ += tokens;
}

}  // namespace sbtrain
