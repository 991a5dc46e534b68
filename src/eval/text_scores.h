// Scores of text tasks, by length and depth.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eval/text_task.h"
#include "job/control.h"

namespace sbtrain {

// The share of the answers that stand somewhere in the generated text, whatever the case of their
// letters: string_match_all of RULER's scripts/eval/synthetic/constants.py. With the one answer of
// passkey it is 1 or 0, as in CoCA. RULER turns control characters into line ends before, which
// cannot change the result.
double string_match_all(std::string_view generated, std::span<const std::string> answers);

struct SampleScore {
  double score = 0;       // 0 .. 1
  double depth = -1;      // as in TextSample
  int64_t prompt = 0;     // tokens
  int64_t position = 0;   // tokens before what is asked for
  int64_t generated = 0;  // tokens, without the one that ended the text
};

// A mean of scores with its 95% interval.
struct ScoreMean {
  int64_t samples = 0;
  double mean = 0;
  double low = 0;
  double high = 1;
};

// The interval is Wilson's (1927) for shares. Scores between 0 and 1 vary no more than shares of
// the same mean do, so that it holds for means of them as well, and is then wider than it need be.
ScoreMean mean_score(std::span<const SampleScore> scores);

// The scores of one depth, or of a tenth of all depths.
struct DepthScore {
  double from = 0;  // depths from here
  double to = 0;    // up to here; the same depth if it was chosen
  ScoreMean score;
};
// In ascending order: by the depths that were chosen for the samples (TextTaskOptions::depths) or,
// without any, by tenths. Leaves out what has no sample.
std::vector<DepthScore> scores_by_depth(std::span<const SampleScore> scores,
                                        std::span<const double> depths);

// What the model generates.
struct Continuation {
  std::string text;
  int64_t tokens = 0;
};
// One continuation for each of the samples' prompts, of at most max_tokens tokens.
using Continue = std::function<std::vector<Continuation>(std::span<const TextSample> samples,
                                                         int64_t max_tokens)>;

// Lets the model continue samples 0 .. samples - 1 of a length, up to `together` of them at once.
// They are dealt to the ranks; every rank gets all scores, in the order of the samples, with the
// same bits for any number of ranks if the continuation of a prompt does not depend on the others.
std::vector<SampleScore> score_samples(Control& ranks, const TextTask& task, int64_t length,
                                       int64_t samples, int64_t together,
                                       const Continue& continuation);

}  // namespace sbtrain
