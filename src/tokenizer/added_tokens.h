// Tokens of a vocabulary that are found in the text as they are written, before anything else is
// done with it: special tokens such as <|endoftext|>, and words that were added to a tokenizer.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sbtrain {

// The fields are those of tokenizer.json.
struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool special = false;      // control, not text: decodes to nothing, and is found only on request
  bool single_word = false;  // only where neither neighbour is a letter, mark, digit or connector
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool normalized = false;   // looked for in the normalised text
};

class AddedTokens {
 public:
  AddedTokens() = default;
  // Searches for the contents, none of which is empty. `special`: special tokens too; otherwise
  // they are text.
  AddedTokens(std::vector<AddedToken> tokens, bool special);

  // Calls `emit` with each part of `text`, in order: a token's id and the text that it stands for,
  // or -1 and the text between tokens, which is not empty. At each place the longest content is
  // found.
  using Emit = std::function<void(int32_t id, std::string_view text)>;
  void split(std::string_view text, const Emit& emit) const;

  bool empty() const { return tokens_.empty(); }
  size_t longest_bytes() const { return longest_bytes_; }
  // Whether a cut of the text after `at` bytes might divide one of the tokens.
  bool divides(std::string_view text, size_t at) const;
  // Whether a token takes white space with it, or looks at its neighbours.
  bool looks_around() const;

 private:
  struct Node {
    std::vector<std::pair<uint8_t, int32_t>> children;
    int32_t token = -1;  // index of the token that ends here
  };
  // The longest token at the start of `text`; null if there is none.
  const AddedToken* longest(std::string_view text) const;
  int32_t child(int32_t node, char byte) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> trie_;
  std::vector<char> first_bytes_;
  size_t longest_bytes_ = 0;
  bool special_ = false;
};

}  // namespace sbtrain
