#include "eval/text_task.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/error.h"
#include "eval/text_prompt.h"

namespace sbtrain {
std::unique_ptr<PromptWriter> make_writer(const TextTaskOptions& options,
                                          const CountTokens& count) {
  switch (options.kind) {
    case TextTaskKind::kPasskey:
      return make_passkey(options);
    case TextTaskKind::kVt:
      return make_variable_tracking(options, count);
    case TextTaskKind::kCwe:
      return make_common_words(options);
    case TextTaskKind::kFwe:
      return make_frequent_words(options);
    default:
      return make_needles(options);
  }
}

bool needs_text(TextTaskKind kind) {
  return name_of(kind).starts_with("needle_local_");
}

Draws PromptWriter::draws(std::string_view part, int64_t length, int64_t index) const {
  return Draws(Philox(options_.seed, RandomPurpose::kTask,
                      fmt::format("{} of {} tokens: {}", name_of(options_.kind), length, part),
                      static_cast<uint64_t>(index)));
}

int64_t PromptWriter::place(Draws& draws, int64_t index, int64_t places) const {
  if (options_.depths.empty()) return draws.below(places);
  const double depth = options_.depths[static_cast<size_t>(index) % options_.depths.size()];
  return std::llround(depth * static_cast<double>(places - 1));
}

TextTask::TextTask(const TextTaskOptions& options, Encode encode)
    : kind_(options.kind),
      encode_(std::move(encode)),
      writer_(make_writer(options, [this](const std::string& text) {
        return static_cast<int64_t>(encode_(text).size());
      })) {}

TextTask::~TextTask() = default;

int64_t TextTask::tokens_to_generate() const {
  return writer_->tokens_to_generate();
}
bool TextTask::has_depth() const {
  return writer_->has_depth();
}

int64_t TextTask::tokens(int64_t length, int64_t index, int64_t units) const {
  return static_cast<int64_t>(encode_(writer_->write(length, index, units).text).size()) +
         tokens_to_generate();
}

// More filler rarely takes fewer tokens, so that the result is the largest number that fits, or at
// least one that fits while one more does not. 0: none fits.
int64_t TextTask::fitting_units(int64_t length, int64_t index) const {
  const int64_t most = writer_->most_units();
  const int64_t fewest = writer_->fewest_units();
  if (fewest > most) return 0;
  const int64_t fewest_tokens = tokens(length, index, fewest);
  if (fewest_tokens > length) return 0;
  int64_t low = fewest;                                                         // fits
  int64_t high = most < std::numeric_limits<int64_t>::max() ? most + 1 : most;  // does not
  // All units take about as many tokens, so that each prompt tells about where the end is. Where
  // that leads nowhere, the range is halved.
  constexpr int kEstimates = 8;
  int64_t guess = 2 * low;
  for (int guesses = 1; high - low > 1; ++guesses) {
    guess = std::clamp(guess, low + 1, std::min(high - 1, 8 * low));  // far too long is slow
    const int64_t taken = tokens(length, index, guess);
    (taken <= length ? low : high) = guess;
    const double per_unit =
        static_cast<double>(taken - fewest_tokens) / static_cast<double>(guess - fewest);
    if (guesses <= kEstimates && per_unit > 0) {
      guess += static_cast<int64_t>(std::floor(static_cast<double>(length - taken) / per_unit));
    } else {
      guess = low + (high - low) / 2;
    }
  }
  return low;
}

std::string TextTask::problem(int64_t length, int64_t samples) const {
  const int64_t fewest = writer_->fewest_units();
  if (fewest > writer_->most_units()) return writer_->shortage();
  int64_t needed = 0;
  for (int64_t i = 0; i < samples; ++i) needed = std::max(needed, tokens(length, i, fewest));
  if (needed > length) {
    return fmt::format("{} needs {} tokens at least, {} of them for the answer", name_of(kind_),
                       needed, tokens_to_generate());
  }
  // Samples differ little in their tokens, so the first one stands for all.
  return fitting_units(length, 0) == writer_->most_units() ? writer_->shortage() : "";
}

int64_t TextTask::units_of_sample(int64_t length, int64_t index) const {
  const int64_t units = fitting_units(length, index);
  if (units == 0) fail(ExitCode::kUsage, "{}", problem(length, index + 1));
  return units;
}

std::pair<std::string, std::vector<std::string>> TextTask::text(int64_t length,
                                                                int64_t index) const {
  TextPrompt prompt = writer_->write(length, index, units_of_sample(length, index));
  return {std::move(prompt.text), std::move(prompt.answers)};
}

TextSample TextTask::sample(int64_t length, int64_t index) const {
  const int64_t units = units_of_sample(length, index);
  const TextPrompt prompt = writer_->write(length, index, units);
  TextSample sample{.prompt = encode_(prompt.text),
                    .answers = prompt.answers,
                    .depth = prompt.depth,
                    .units = units};
  if (prompt.depth >= 0) {
    sample.position = static_cast<int64_t>(encode_(prompt.text.substr(0, prompt.needle)).size());
  }
  return sample;
}

}  // namespace sbtrain
