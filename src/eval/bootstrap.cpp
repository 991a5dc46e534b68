#include "eval/bootstrap.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/error.h"
#include "core/philox.h"

namespace sbtrain {
namespace {

constexpr double kTail = 0.025;  // on each side of a 95% interval

// Between the two values that stand nearest to it.
double quantile(const std::vector<double>& sorted, double share) {
  const double place = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], place - static_cast<double>(below));
}

}  // namespace

std::optional<Interval> bootstrap_interval(std::span<const DocumentSum> documents,
                                           int64_t resamples) {
  std::vector<DocumentSum> counted;
  std::ranges::copy_if(documents, std::back_inserter(counted),
                       [](const DocumentSum& document) { return document.tokens > 0; });
  const size_t count = counted.size();
  if (count < 2 || resamples <= 0) return std::nullopt;
  std::vector<double> means;
  for (int64_t r = 0; r < resamples; ++r) {
    const Philox random(0, RandomPurpose::kBootstrap, "documents", static_cast<uint64_t>(r));
    double sum = 0;
    double tokens = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto drawn = static_cast<size_t>(random.uniform(i) * static_cast<double>(count));
      sum += counted[drawn].sum;
      tokens += static_cast<double>(counted[drawn].tokens);
    }
    means.push_back(sum / tokens);
  }
  std::ranges::sort(means);
  return Interval{quantile(means, kTail), quantile(means, 1 - kTail)};
}

std::optional<Interval> loss_interval(std::span<const DocumentScore> documents, int64_t resamples) {
  std::vector<DocumentSum> sums;
  for (const DocumentScore& document : documents) {
    sums.push_back({document.loss_sum, document.tokens});
  }
  return bootstrap_interval(sums, resamples);
}

std::optional<Interval> difference_interval(std::span<const DocumentScore> a,
                                            std::span<const DocumentScore> b, int64_t resamples) {
  require(a.size() == b.size(), "losses of {} documents beside those of {}", a.size(), b.size());
  std::vector<DocumentSum> sums;
  for (size_t i = 0; i < a.size(); ++i) {
    require(
        a[i].store == b[i].store && a[i].document == b[i].document && a[i].tokens == b[i].tokens,
        "{} targets of document {} beside {} of document {}", a[i].tokens, a[i].document,
        b[i].tokens, b[i].document);
    sums.push_back({a[i].loss_sum - b[i].loss_sum, a[i].tokens});
  }
  return bootstrap_interval(sums, resamples);
}

}  // namespace sbtrain
