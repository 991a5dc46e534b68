// The memory of a cache that drops keys by their forget gates, for all layers of a model that have
// them.
//
// A gate bounds what any query gives to its key, A_ij <= f_i, so a key whose gates are all below a
// bound is not kept. For one query, let D be the keys that it saw before and that were dropped. The
// weights and the remainder are the probabilities with which the nearest key breaks the stick, each
// by itself with probability beta; without D they differ only where one of D would have been that
// key. So with the same queries, keys and values a layer's output changes by at most
//   diameter * sum_{i in D} A_ij  <=  diameter * (1 - prod_{i in D} (1 - f_i)),
// where the diameter is the largest distance of two values, that of the remainder among them (0
// without one). A token's own key is seen by its query in any case.
//
// Each head of keys takes pages of 64 keys from one pool (ops/kept_keys.h). Where a step might need
// a page, the host must know how many keys the heads keep. A step adds one at most, so it reads the
// device's counts only where that bound comes to the end of a page, and then gives every head room
// for some steps.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "attention/attention.h"
#include "core/error.h"
#include "core/memory.h"

namespace sbtrain {

struct KeyDropping {
  double below = 0;  // keys whose gates are all below this are dropped; 0: none
  double share = 1;  // of the keys of all tokens, for which the cache takes memory at most
  bool active() const { return below > 0; }
};

// More keys are kept than the cache has memory for.
class CacheFull : public Error {
 public:
  using Error::Error;
};

// What sequences keep, as of the last time that the device's counts were read.
struct CacheUse {
  int64_t seen = 0;        // keys of the tokens of all sequences so far, over layers and heads
  int64_t kept = 0;        // of these
  int64_t bytes = 0;       // of the pages of those sequences that have not ended
  int64_t most_bytes = 0;  // that all pages may take
  // Only where keys were seen.
  double share_kept() const { return static_cast<double>(kept) / static_cast<double>(seen); }
};

// Bytes of a key with its value and its gates.
int64_t kept_key_bytes(const AttentionShape& shape, DType dtype);

class KeptKeys {
 public:
  // For `layers` layers, `sequences` sequences and `capacity` tokens of each.
  KeptKeys(Memory& memory, const AttentionShape& shape, int64_t layers, int64_t sequences,
           int64_t capacity, const KeyDropping& dropping);

  float bound() const { return bound_; }
  // Of a layer, for the first sequences: the addresses of pages [B, G, M], and the keys that heads
  // keep [B, G].
  Tensor pages(int64_t layer, int64_t sequences) const;
  Tensor counts(int64_t layer, int64_t sequences) const;

  // Keeps keys of a prompt's tokens, which the sequence begins with. Throws CacheFull.
  void store(Stream& s, int64_t layer, int64_t sequence, const Tensor& k_TGd, const Tensor& v_TGd,
             const Tensor& gate_TH);
  // Makes room for one token more of each of `sequences`. Returns those for which there is none.
  std::vector<int64_t> make_room(Stream& s, std::span<const int64_t> sequences);
  // Each has got a token.
  void stepped(std::span<const int64_t> sequences);
  // The sequence has ended. Its pages are free.
  void release(int64_t sequence);
  CacheUse use() const;
  // Reads how many keys these sequences keep.
  void read_counts(Stream& s, std::span<const int64_t> sequences);
  // What a user can do where the cache is full.
  CacheFull full() const;

 private:
  struct Head {
    int32_t kept = 0;   // when the counts were read
    int32_t pages = 0;  // that it has
  };
  struct Sequence {
    int64_t tokens = 0;  // when the counts were read
    int64_t kept = 0;    // by all heads, likewise
    int64_t since = 0;   // steps since then
    int64_t room = 0;    // steps from then on that all heads have pages for
  };
  Head& head(int64_t sequence, int64_t h) {
    return heads_[static_cast<size_t>(sequence * layers_ * key_heads_ + h)];
  }
  Sequence& at(int64_t sequence) { return sequences_[static_cast<size_t>(sequence)]; }
  bool reserve(int64_t sequence, int64_t h, int64_t keys);
  void count(int64_t sequence);
  std::optional<int64_t> take_page();
  void grow();
  void upload_pages(Stream& s);
  void mark(int64_t sequence);

  Memory& memory_;
  float bound_;
  int64_t layers_, key_heads_;
  int64_t of_head_;  // pages that a head may come to have
  int64_t page_bytes_;
  int64_t most_pages_;  // in all
  int64_t chunk_;       // pages that are allocated at a time
  std::vector<Buffer> chunks_;
  int64_t allocated_ = 0;      // pages
  std::vector<int64_t> free_;  // their addresses
  int64_t nobodys_ = 0;        // where rows of a step that have no sequence write
  std::vector<Head> heads_;    // [sequence, layer, head]
  std::vector<Sequence> sequences_;
  CacheUse ended_;                       // seen and kept
  std::vector<int64_t> table_;           // the addresses on the host, [sequence, layer, head, page]
  std::pair<int64_t, int64_t> changed_;  // sequences whose addresses the device lacks
  Buffer pages_BLxGM_;
  Buffer counts_BLxG_;
};

// Of one layer.
struct KeptKeysCache : AttentionCache {
  KeptKeysCache(KeptKeys& keys, int64_t layer) : keys(keys), layer(layer) {}
  KeptKeys& keys;
  int64_t layer;
};

}  // namespace sbtrain
