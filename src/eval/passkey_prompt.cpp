// The passkey task of CoCA (arXiv 2309.08646, appendix B.1, listing 1), after Mohtashami and Jaggi
// (arXiv 2305.16300). The spelling is that of the listing; its lines are joined as in the code of
// the older paper.
#include "core/error.h"
#include "eval/text_prompt.h"

namespace sbtrain {
namespace {

constexpr const char* kTask =
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I "
    "will quiz you about the important information there.\n";
constexpr const char* kFiller =
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.";

std::string repeated(int64_t times) {
  std::string text;
  for (int64_t i = 0; i < times; ++i) text += (i > 0 ? std::string(" ") : "") + kFiller;
  return text;
}

class Passkey : public PromptWriter {
 public:
  using PromptWriter::PromptWriter;
  int64_t tokens_to_generate() const override { return 64; }
  bool has_depth() const override { return true; }

  TextPrompt write(int64_t length, int64_t index, int64_t units) const override {
    Draws random = draws("key and place", length, index);
    const std::string key = std::to_string(10000 + random.below(90000));
    const int64_t before = place(random, index, units + 1);
    TextPrompt prompt{.text = kTask,
                      .answers = {key},
                      .depth = static_cast<double>(before) / static_cast<double>(units)};
    if (before > 0) prompt.text += repeated(before) + "\n";
    prompt.needle = prompt.text.size();
    prompt.text += fmt::format("The passkey is {0}. Remeber it. {0} is the passkey.\n", key);
    if (before < units) prompt.text += repeated(units - before) + "\n";
    prompt.text += "What is the passkey?";
    return prompt;
  }
};

}  // namespace

std::unique_ptr<PromptWriter> make_passkey(const TextTaskOptions& options) {
  return std::make_unique<Passkey>(options);
}

}  // namespace sbtrain
