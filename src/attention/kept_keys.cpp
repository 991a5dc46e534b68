#include "attention/kept_keys.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/kept_keys.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

using ops::kPageKeys;

// Steps for which heads get pages where the counts are read, if there are any left.
constexpr int64_t kSpareKeys = 32;
// Parts in which the pages are allocated, each when the ones before are in use.
constexpr int64_t kChunks = 16;

int64_t pages_for(int64_t keys) {
  return (keys + kPageKeys - 1) / kPageKeys;
}

}  // namespace

int64_t kept_key_bytes(const AttentionShape& shape, DType dtype) {
  return kernels::page_bytes(shape.head_width(), static_cast<int64_t>(dtype_size(dtype)),
                             shape.heads / shape.key_heads()) /
         kPageKeys;
}

KeptKeys::KeptKeys(Memory& memory, const AttentionShape& shape, int64_t layers, int64_t sequences,
                   int64_t capacity, const KeyDropping& dropping)
    : memory_(memory),
      bound_(static_cast<float>(dropping.below)),
      layers_(layers),
      key_heads_(shape.key_heads()),
      of_head_(pages_for(capacity)),
      page_bytes_(kPageKeys * kept_key_bytes(shape, memory.compute_dtype())),
      heads_(static_cast<size_t>(sequences * layers * key_heads_)),
      sequences_(static_cast<size_t>(sequences)),
      table_(static_cast<size_t>(sequences * layers * key_heads_ * of_head_)),
      changed_(0, sequences),
      pages_BLxGM_(memory.allocate(MemoryClass::kAttention, "pages of the cache", DType::kI64,
                                   {sequences * layers, key_heads_ * of_head_})),
      counts_BLxG_(memory.allocate(MemoryClass::kAttention, "kept keys", DType::kI32,
                                   {sequences * layers, key_heads_})) {
  const auto all = static_cast<double>(table_.size());
  most_pages_ = 1 + std::max<int64_t>(1, static_cast<int64_t>(std::ceil(dropping.share * all)));
  chunk_ = std::max<int64_t>(1, (most_pages_ + kChunks - 1) / kChunks);
  do {
    grow();
  } while (memory.backend() == Backend::kPlan && allocated_ < most_pages_);
  if (memory.backend() == Backend::kPlan) return;
  nobodys_ = *take_page();
  std::ranges::fill(table_, nobodys_);
}

void KeptKeys::grow() {
  const int64_t pages = std::min(chunk_, most_pages_ - allocated_);
  chunks_.push_back(
      memory_.allocate(MemoryClass::kAttention, "key cache", DType::kU8, {pages, page_bytes_}));
  allocated_ += pages;
  const auto first = reinterpret_cast<int64_t>(chunks_.back().tensor().data);
  for (int64_t i = pages - 1; i >= 0; --i) free_.push_back(first + i * page_bytes_);
}

std::optional<int64_t> KeptKeys::take_page() {
  if (free_.empty() && allocated_ < most_pages_) grow();
  if (free_.empty()) return std::nullopt;
  const int64_t page = free_.back();
  free_.pop_back();
  return page;
}

Tensor KeptKeys::pages(int64_t layer, int64_t sequences) const {
  const Tensor& all = pages_BLxGM_;
  Tensor of_layer = all.row_range(layer, 1).reshaped({1, key_heads_, of_head_});
  of_layer.shape[0] = sequences;
  of_layer.row_stride = layers_ * key_heads_ * of_head_;
  return of_layer;
}

Tensor KeptKeys::counts(int64_t layer, int64_t sequences) const {
  Tensor of_layer = counts_BLxG_.tensor().row_range(layer, 1);
  of_layer.shape[0] = sequences;
  of_layer.row_stride = layers_ * key_heads_;
  return of_layer;
}

void KeptKeys::mark(int64_t sequence) {
  const auto [begin, end] = changed_;
  changed_ = begin == end ? std::pair(sequence, sequence + 1)
                          : std::pair(std::min(begin, sequence), std::max(end, sequence + 1));
}

void KeptKeys::upload_pages(Stream& s) {
  const auto [begin, end] = changed_;
  if (begin == end) return;
  const int64_t row = key_heads_ * of_head_;
  ops::run(s, ops::CopyFromHost{
                  .y = pages_BLxGM_.tensor().row_range(begin * layers_, (end - begin) * layers_),
                  .host = table_.data() + begin * layers_ * row});
  changed_ = {0, 0};
}

// Gives head h of a sequence, counted over the layers, pages for so many keys. Returns false if
// there are too few.
bool KeptKeys::reserve(int64_t sequence, int64_t h, int64_t keys) {
  Head& mine = head(sequence, h);
  const int64_t pages = std::min(pages_for(keys), of_head_);
  while (mine.pages < pages) {
    const std::optional<int64_t> page = take_page();
    if (!page) return false;
    const int64_t at = (sequence * layers_ * key_heads_ + h) * of_head_ + mine.pages++;
    table_[static_cast<size_t>(at)] = *page;
    mark(sequence);
  }
  return true;
}

// Adds up what the heads keep, and finds for how many steps they have room: a head with all the
// pages that it may have has it for all tokens.
void KeptKeys::count(int64_t sequence) {
  Sequence& mine = at(sequence);
  mine.kept = 0;
  mine.room = std::numeric_limits<int64_t>::max();
  for (int64_t h = 0; h < layers_ * key_heads_; ++h) {
    const Head& of = head(sequence, h);
    mine.kept += of.kept;
    if (of.pages < of_head_) mine.room = std::min(mine.room, of.pages * kPageKeys - of.kept);
  }
}

void KeptKeys::store(Stream& s, int64_t layer, int64_t sequence, const Tensor& k_TGd,
                     const Tensor& v_TGd, const Tensor& gate_TH) {
  const Buffer rows_GT = s.scratch("rows of keys", DType::kI32, {key_heads_, gate_TH.rows()});
  const int64_t row = sequence * layers_ + layer;
  const Tensor counts_G = counts_BLxG_.tensor().row_range(row, 1);
  ops::run(s, ops::KeepKeys{
                  .rows_GT = rows_GT, .counts_G = counts_G, .gate_TH = gate_TH, .bound = bound_});
  if (!s.planning()) {
    std::vector<int32_t> counts(static_cast<size_t>(key_heads_));
    ops::run(s, ops::CopyToHost{.host = counts.data(), .x = counts_G});
    for (int64_t g = 0; g < key_heads_; ++g) {
      const int64_t h = layer * key_heads_ + g;
      head(sequence, h).kept = counts[static_cast<size_t>(g)];
      if (reserve(sequence, h, counts[static_cast<size_t>(g)])) continue;
      at(sequence) = {};  // such a prompt does not count
      throw full();
    }
    at(sequence) = {.tokens = gate_TH.rows()};
    count(sequence);
    upload_pages(s);
  }
  ops::run(s, ops::StoreKeys{.pages_1GM = pages(row, 1),
                             .rows_GT = rows_GT,
                             .k_TGd = k_TGd,
                             .v_TGd = v_TGd,
                             .gate_TH = gate_TH});
}

void KeptKeys::read_counts(Stream& s, std::span<const int64_t> sequences) {
  if (s.planning()) return;
  std::vector<int32_t> counts(heads_.size());
  ops::run(s, ops::CopyToHost{.host = counts.data(), .x = counts_BLxG_});
  for (const int64_t b : sequences) {
    const int64_t first = b * layers_ * key_heads_;
    for (int64_t h = 0; h < layers_ * key_heads_; ++h) {
      head(b, h).kept = counts[static_cast<size_t>(first + h)];
    }
    at(b).tokens += at(b).since;
    at(b).since = 0;
    count(b);
  }
}

std::vector<int64_t> KeptKeys::make_room(Stream& s, std::span<const int64_t> sequences) {
  std::vector<int64_t> without;
  if (s.planning()) return without;
  const auto ends = [&](int64_t b) { return at(b).since >= at(b).room; };
  if (std::ranges::any_of(sequences, ends)) {
    read_counts(s, sequences);
    // What the step needs comes before what the next ones may need.
    for (const int64_t keys : {int64_t{1}, kSpareKeys}) {
      for (const int64_t b : sequences) {
        bool room = true;
        for (int64_t h = 0; h < layers_ * key_heads_ && room; ++h) {
          room = reserve(b, h, head(b, h).kept + keys);
        }
        if (!room && keys == 1) without.push_back(b);
      }
    }
    for (const int64_t b : sequences) count(b);
  }
  if (changed_.first < changed_.second) {
    upload_pages(s);
    ops::run(s, ops::Synchronize{});  // another stream may run the step
  }
  return without;
}

void KeptKeys::stepped(std::span<const int64_t> sequences) {
  for (const int64_t b : sequences) ++at(b).since;
}

void KeptKeys::release(int64_t sequence) {
  for (int64_t h = 0; h < layers_ * key_heads_; ++h) {
    const auto first = table_.begin() + (sequence * layers_ * key_heads_ + h) * of_head_;
    free_.insert(free_.end(), first, first + head(sequence, h).pages);
    std::fill_n(first, head(sequence, h).pages, nobodys_);
    head(sequence, h) = {};
  }
  ended_.seen += at(sequence).tokens * layers_ * key_heads_;
  ended_.kept += at(sequence).kept;
  at(sequence) = {};
  mark(sequence);
}

CacheUse KeptKeys::use() const {
  CacheUse use = ended_;
  for (const Sequence& sequence : sequences_) {
    use.seen += sequence.tokens * layers_ * key_heads_;
    use.kept += sequence.kept;
  }
  const int64_t taken = allocated_ - static_cast<int64_t>(free_.size()) - 1;  // but nobody's
  use.bytes = taken * page_bytes_;
  use.most_bytes = most_pages_ * page_bytes_;
  return use;
}

CacheFull KeptKeys::full() const {
  return {ExitCode::kOutOfMemory,
          fmt::format("the cache is full: its {} pages of {} keys are all in use (layers and heads "
                      "keep more keys than --cache-share allows)",
                      most_pages_ - 1, kPageKeys)};
}

}  // namespace sbtrain
