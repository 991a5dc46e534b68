#include "eval/text_scores.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/error.h"
#include "core/in_parallel.h"
#include "eval/rank_sums.h"

namespace sbtrain {
namespace {

std::string lower_case(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

// All samples' scores, of which a rank fills in those that it has: to be added up.
struct AllScores {
  std::vector<SampleScore> scores;
  void visit(const auto& f) {
    for (SampleScore& s : scores) {
      f(s.score);
      f(s.depth);
      f(s.prompt);
      f(s.position);
      f(s.generated);
    }
  }
};

constexpr SampleScore kNothing = {.depth = 0};

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace

double string_match_all(std::string_view generated, std::span<const std::string> answers) {
  const std::string text = lower_case(generated);
  const auto found = std::ranges::count_if(answers, [&](const std::string& answer) {
    return text.find(lower_case(answer)) != std::string::npos;
  });
  return static_cast<double>(found) / static_cast<double>(answers.size());
}

ScoreMean mean_score(std::span<const SampleScore> scores) {
  if (scores.empty()) return {};
  constexpr double kZ = 1.959963984540054;  // the 97.5th percentile of the normal distribution
  double sum = 0;
  for (const SampleScore& s : scores) sum += s.score;
  const auto n = static_cast<double>(scores.size());
  const double mean = sum / n;
  const double scale = 1 / (1 + kZ * kZ / n);
  const double center = scale * (mean + kZ * kZ / (2 * n));
  const double half = scale * kZ * std::sqrt(mean * (1 - mean) / n + kZ * kZ / (4 * n * n));
  // Rounding must not put the mean outside of its interval.
  return {.samples = static_cast<int64_t>(scores.size()),
          .mean = mean,
          .low = std::clamp(center - half, 0.0, mean),
          .high = std::clamp(center + half, mean, 1.0)};
}

std::vector<DepthScore> scores_by_depth(std::span<const SampleScore> scores,
                                        std::span<const double> depths) {
  std::map<double, std::vector<SampleScore>> parts;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (scores[i].depth < 0) continue;
    const double tenth = std::min(9.0, std::floor(scores[i].depth * 10)) / 10;
    parts[depths.empty() ? tenth : depths[i % depths.size()]].push_back(scores[i]);
  }
  std::vector<DepthScore> result;
  for (const auto& [depth, part] : parts) {
    result.push_back(
        {.from = depth, .to = depths.empty() ? depth + 0.1 : depth, .score = mean_score(part)});
  }
  return result;
}

std::vector<SampleScore> score_samples(Control& ranks, const TextTask& task, int64_t length,
                                       int64_t samples, int64_t together,
                                       const Continue& continuation) {
  require(samples > 0 && together > 0, "{} samples, {} at once", samples, together);
  const AllScores zero{std::vector<SampleScore>(static_cast<size_t>(samples), kNothing)};
  const int64_t of_rank = ceil_div(samples, ranks.world());
  const int64_t group = ceil_div(of_rank, ceil_div(of_rank, together));  // of equal sizes
  const auto of_group = [&](int64_t g) {
    const int64_t first = g * group;
    std::vector<TextSample> prompts(static_cast<size_t>(std::min(group, samples - first)));
    in_parallel(static_cast<int64_t>(prompts.size()), [&](int64_t i) {
      prompts[static_cast<size_t>(i)] = task.sample(length, first + i);
    });
    const std::vector<Continuation> generated = continuation(prompts, task.tokens_to_generate());
    require(generated.size() == prompts.size(), "{} continuations of {} prompts", generated.size(),
            prompts.size());
    AllScores all = zero;
    for (size_t i = 0; i < prompts.size(); ++i) {
      const TextSample& sample = prompts[i];
      all.scores[static_cast<size_t>(first) + i] = {
          .score = string_match_all(generated[i].text, sample.answers),
          .depth = sample.depth,
          .prompt = static_cast<int64_t>(sample.prompt.size()),
          .position = sample.position,
          .generated = generated[i].tokens};
    }
    return all;
  };
  return sum_over_ranks<AllScores>(ranks, ceil_div(samples, group), zero, of_group).scores;
}

}  // namespace sbtrain
