// Training of a byte-level BPE (Sennrich et al., arXiv 1508.07909, on bytes as GPT-2 has it).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sbtrain {

// The tokenizer.json of a byte-level BPE of `vocab` tokens: the 256 bytes by their value, merges in
// the order in which they were found, <|begin_of_text|> and <|end_of_text|>. The texts are cut into
// pieces as Llama 3's tokenizer cuts them, and no token crosses a piece. Each merge is the pair
// that occurs most often; of equally frequent ones that with the smaller ids. Pairs that occur only
// once are not merged. Throws ExitCode::kUsage if the texts have too few pairs.
std::string train_bpe(const std::vector<std::string>& texts, int64_t vocab);

}  // namespace sbtrain
