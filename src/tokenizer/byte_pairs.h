// Byte-pair encoding (Sennrich et al., arXiv 1508.07909) of bytes, as GPT-2 applies it: a piece of
// text starts as single bytes; the adjacent pair of lowest rank, the leftmost of equal ones,
// becomes one token, until no adjacent tokens form a pair.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sbtrain {

class BytePairs {
 public:
  struct Merge {
    int32_t left = 0;
    int32_t right = 0;
    int32_t rank = 0;
    int32_t result = 0;
  };
  struct Description {
    std::array<int32_t, 256> byte_ids{};  // the token of each byte
    std::vector<Merge> merges;            // of those with the same pair the first one counts
    // Tokens by their bytes: a piece that is one of them becomes it, whatever the merges are.
    std::unordered_map<std::string, int32_t> whole_pieces;
  };
  explicit BytePairs(Description description);

  // What encoding writes to: one for each thread. It remembers the tokens of short pieces, up to a
  // fixed number of them.
  class Scratch;

  // Appends the tokens of a piece. Takes time n log n of its length.
  void encode(std::string_view piece, std::vector<int32_t>& ids, Scratch& scratch) const;

 private:
  struct Entry {
    uint64_t pair = kNoPair;
    int32_t rank = kNoRank;
    int32_t result = 0;
  };
  static constexpr uint64_t kNoPair = ~uint64_t{0};
  static constexpr int32_t kNoRank = INT32_MAX;

  void encode_new(std::string_view piece, std::vector<int32_t>& ids, Scratch& scratch) const;
  const Entry& find(int32_t left, int32_t right) const;
  void encode_short(std::string_view piece, std::vector<int32_t>& ids, Scratch& scratch) const;
  void encode_long(std::string_view piece, std::vector<int32_t>& ids, Scratch& scratch) const;

  std::array<int32_t, 256> byte_ids_;
  std::unordered_map<std::string, int32_t> whole_pieces_;
  size_t longest_whole_ = 0;
  std::vector<Entry> table_;  // open addressing; its size is a power of two
  Entry none_;
};

class BytePairs::Scratch {
 public:
  Scratch() : memory_(kSlots) {}

 private:
  friend class BytePairs;

  // A short piece and its tokens, in one cache line.
  static constexpr size_t kKeyBytes = 23;
  static constexpr size_t kKeyWords = 3;
  static constexpr size_t kTokens = 9;
  static constexpr size_t kSlots = size_t{1} << 15;  // 2 MiB
  using Key = std::array<uint64_t, kKeyWords>;  // the piece's bytes; its length is the last one
  struct alignas(64) Slot {
    Key key{};
    std::array<int32_t, kTokens> ids{};
    uint32_t count = 0;
  };
  static Key key_of(std::string_view piece);
  Slot& slot_of(const Key& key);

  // A token of a short piece, and the merge of it and the next one.
  struct Symbol {
    int32_t id;
    int32_t rank;
    int32_t result;
  };
  // A token of a long piece in a doubly linked list; id -1: merged into the one before.
  struct Node {
    int32_t id;
    int32_t previous;
    int32_t next;
  };
  // A merge that was possible when it was put into the heap.
  struct Candidate {
    int32_t rank;
    int32_t position;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };

  std::vector<Slot> memory_;
  std::vector<Symbol> symbols_;
  std::vector<Node> nodes_;
  std::vector<Candidate> heap_;
};

}  // namespace sbtrain
