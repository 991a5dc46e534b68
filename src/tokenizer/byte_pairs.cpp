#include "tokenizer/byte_pairs.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "core/error.h"

namespace sbtrain {
namespace {

// Up to this length, looking through all pairs for each merge is faster than a heap.
constexpr size_t kShortPiece = 64;

uint64_t pair_of(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

// The finalizer of SplitMix64 (Steele et al., 2014): every bit of the value changes every bit of
// the hash.
uint64_t mix(uint64_t value) {
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

}  // namespace

BytePairs::BytePairs(Description description)
    : byte_ids_(description.byte_ids), whole_pieces_(std::move(description.whole_pieces)) {
  for (const auto& [bytes, id] : whole_pieces_) {
    longest_whole_ = std::max(longest_whole_, bytes.size());
  }
  size_t size = 16;
  while (size < 2 * description.merges.size()) size *= 2;
  table_.resize(size);
  for (const Merge& merge : description.merges) {
    const uint64_t pair = pair_of(merge.left, merge.right);
    size_t i = mix(pair) & (size - 1);
    while (table_[i].pair != kNoPair && table_[i].pair != pair) i = (i + 1) & (size - 1);
    if (table_[i].pair == kNoPair) table_[i] = {pair, merge.rank, merge.result};
  }
}

const BytePairs::Entry& BytePairs::find(int32_t left, int32_t right) const {
  const uint64_t pair = pair_of(left, right);
  const size_t last = table_.size() - 1;
  for (size_t i = mix(pair) & last; table_[i].pair != kNoPair; i = (i + 1) & last) {
    if (table_[i].pair == pair) return table_[i];
  }
  return none_;
}

BytePairs::Scratch::Key BytePairs::Scratch::key_of(std::string_view piece) {
  std::array<char, kKeyBytes + 1> bytes{};
  std::memcpy(bytes.data(), piece.data(), piece.size());
  bytes[kKeyBytes] = static_cast<char>(piece.size());
  Key key;
  static_assert(sizeof key == sizeof bytes);
  std::memcpy(key.data(), bytes.data(), sizeof key);
  return key;
}

BytePairs::Scratch::Slot& BytePairs::Scratch::slot_of(const Key& key) {
  return memory_[mix(key[0] ^ mix(key[1] ^ mix(key[2]))) & (kSlots - 1)];
}

void BytePairs::encode(std::string_view piece, std::vector<int32_t>& ids, Scratch& scratch) const {
  if (piece.empty()) return;
  if (piece.size() > Scratch::kKeyBytes) return encode_new(piece, ids, scratch);
  const Scratch::Key key = Scratch::key_of(piece);
  Scratch::Slot& slot = scratch.slot_of(key);
  if (slot.key == key) {
    ids.insert(ids.end(), slot.ids.begin(), slot.ids.begin() + slot.count);
    return;
  }
  const size_t before = ids.size();
  encode_new(piece, ids, scratch);
  const size_t count = ids.size() - before;
  if (count > Scratch::kTokens) return;
  slot.key = key;
  slot.count = static_cast<uint32_t>(count);
  std::copy(ids.begin() + static_cast<int64_t>(before), ids.end(), slot.ids.begin());
}

void BytePairs::encode_new(std::string_view piece, std::vector<int32_t>& ids,
                           Scratch& scratch) const {
  if (piece.size() <= longest_whole_) {
    const auto whole = whole_pieces_.find(std::string(piece));
    if (whole != whole_pieces_.end()) {
      ids.push_back(whole->second);
      return;
    }
  }
  if (piece.size() > kShortPiece) {
    encode_long(piece, ids, scratch);
  } else {
    encode_short(piece, ids, scratch);
  }
}

void BytePairs::encode_short(std::string_view piece, std::vector<int32_t>& ids,
                             Scratch& scratch) const {
  std::vector<Scratch::Symbol>& symbols = scratch.symbols_;
  symbols.clear();
  for (const char byte : piece) {
    symbols.push_back({byte_ids_[static_cast<uint8_t>(byte)], kNoRank, 0});
  }
  const auto look_up = [&](size_t i) {
    if (i + 1 == symbols.size()) {
      symbols[i].rank = kNoRank;
      return;
    }
    const Entry& merge = find(symbols[i].id, symbols[i + 1].id);
    symbols[i].rank = merge.rank;
    symbols[i].result = merge.result;
  };
  for (size_t i = 0; i < symbols.size(); ++i) look_up(i);
  while (true) {
    const auto best = std::min_element(
        symbols.begin(), symbols.end(),
        [](const Scratch::Symbol& a, const Scratch::Symbol& b) { return a.rank < b.rank; });
    if (best->rank == kNoRank) break;
    best->id = best->result;
    symbols.erase(best + 1);
    const auto i = static_cast<size_t>(best - symbols.begin());
    look_up(i);
    if (i > 0) look_up(i - 1);
  }
  for (const Scratch::Symbol& symbol : symbols) ids.push_back(symbol.id);
}

void BytePairs::encode_long(std::string_view piece, std::vector<int32_t>& ids,
                            Scratch& scratch) const {
  require(piece.size() < size_t{INT32_MAX}, "a piece of {} bytes", piece.size());
  const auto count = static_cast<int32_t>(piece.size());
  std::vector<Scratch::Node>& nodes = scratch.nodes_;
  std::vector<Scratch::Candidate>& heap = scratch.heap_;
  nodes.clear();
  heap.clear();
  const auto node = [&](int32_t i) -> Scratch::Node& { return nodes[static_cast<size_t>(i)]; };
  // The merge of a token and the next one.
  const auto merge_at = [&](int32_t i) -> const Entry& {
    return node(i).next < 0 ? none_ : find(node(i).id, node(node(i).next).id);
  };
  for (int32_t i = 0; i < count; ++i) {
    const auto byte = static_cast<uint8_t>(piece[static_cast<size_t>(i)]);
    nodes.push_back({byte_ids_[byte], i - 1, i + 1 < count ? i + 1 : -1});
  }
  for (int32_t i = 0; i < count; ++i) {
    if (const Entry& merge = merge_at(i); merge.rank != kNoRank) heap.push_back({merge.rank, i});
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto push = [&](int32_t i) {
    const Entry& merge = merge_at(i);
    if (merge.rank == kNoRank) return;
    heap.push_back({merge.rank, i});
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    const Scratch::Candidate best = heap.front();
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
    if (node(best.position).id < 0) continue;
    const Entry& merge = merge_at(best.position);
    if (merge.rank != best.rank) continue;  // a neighbour has been merged since
    Scratch::Node& left = node(best.position);
    Scratch::Node& right = node(left.next);
    left.id = merge.result;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) node(left.next).previous = best.position;
    push(best.position);
    if (left.previous >= 0) push(left.previous);
  }
  for (int32_t i = 0; i >= 0; i = node(i).next) ids.push_back(node(i).id);
}

}  // namespace sbtrain
