#include "data/packing.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "core/error.h"
#include "data/document_store.h"

namespace sbtrain {

int64_t Row::tokens() const {
  int64_t sum = 0;
  for (const Piece& piece : pieces) sum += piece.document >= 0 ? piece.length : 0;
  return sum;
}

namespace {

// The documents of a source, in the order of each epoch, one epoch after the other.
class DocumentStream {
 public:
  DocumentStream(RowSource source, SourceCursor cursor)
      : source_(std::move(source)), epoch_(cursor.epoch), position_(cursor.position) {
    if (epoch_ < 0 || position_ < 0 || position_ >= documents() || cursor.offset < 0) {
      fail(ExitCode::kConfig, "data state: epoch {}, document {}, offset {} in a source of {}",
           epoch_, position_, cursor.offset, documents());
    }
    shuffle();
  }

  const RowSource& source() const { return source_; }
  int64_t epoch() const { return epoch_; }
  int64_t position() const { return position_; }
  int64_t documents() const { return static_cast<int64_t>(source_.offsets.size()) - 1; }
  int64_t document() const { return (*order_)(position_); }
  int64_t length(int64_t document) const {
    const auto n = static_cast<size_t>(document);
    return static_cast<int64_t>(source_.offsets[n + 1] - source_.offsets[n]);
  }
  void advance() {
    if (++position_ < documents()) return;
    position_ = 0;
    ++epoch_;
    shuffle();
  }

 private:
  void shuffle() {
    order_.emplace(source_.seed, source_.content_hash, static_cast<uint64_t>(epoch_), documents());
  }
  RowSource source_;
  int64_t epoch_;
  int64_t position_;
  std::optional<Permutation> order_;
};

// Treats the source as a ring of tokens, in the order of the file, and cuts it into rows. The rows
// are seen in a permuted order, so that the rows of a batch come from all parts of the source. The
// places of the cuts differ from epoch to epoch.
class ConcatPacker : public Packer {
 public:
  ConcatPacker(RowSource source, SourceCursor cursor)
      : source_(std::move(source)),
        tokens_(static_cast<int64_t>(source_.offsets.back())),
        rows_((tokens_ + source_.row_tokens - 1) / source_.row_tokens),
        cursor_(cursor) {
    if (cursor_.epoch < 0 || cursor_.position < 0 || cursor_.position >= rows_ ||
        cursor_.offset != 0) {
      fail(ExitCode::kConfig, "data state: epoch {}, row {} in a source of {} rows", cursor_.epoch,
           cursor_.position, rows_);
    }
    shuffle();
  }

  Row next() override {
    const int64_t first = (*order_)(cursor_.position) * source_.row_tokens;
    Row row;
    int64_t left = std::min(source_.row_tokens, tokens_ - first);
    const int64_t padding = source_.row_tokens - left;
    int64_t at = (shift_ + first) % tokens_;
    while (left > 0) {
      const int64_t document = document_at(at);
      const int64_t begin = at - start_of(document);
      const int64_t take = std::min(left, start_of(document + 1) - at);
      row.pieces.push_back({document, begin, take});
      left -= take;
      at = (at + take) % tokens_;
    }
    if (padding > 0) {
      row.pieces.push_back({-1, 0, padding});
    } else if (start_of(document_at(at)) == at) {
      row.next_document = document_at(at);
    }
    advance();
    return row;
  }

  SourceCursor cursor() const override { return cursor_; }

 private:
  int64_t start_of(int64_t document) const {
    return static_cast<int64_t>(source_.offsets[static_cast<size_t>(document)]);
  }
  // The document that holds token `at`; empty documents hold none.
  int64_t document_at(int64_t at) const {
    const auto behind =
        std::upper_bound(source_.offsets.begin(), source_.offsets.end(), static_cast<uint64_t>(at));
    return behind - source_.offsets.begin() - 1;
  }
  void advance() {
    if (++cursor_.position < rows_) return;
    cursor_ = {cursor_.epoch + 1, 0, 0};
    shuffle();
  }
  void shuffle() {
    const auto epoch = static_cast<uint64_t>(cursor_.epoch);
    order_.emplace(source_.seed, source_.content_hash, epoch, rows_);
    const Philox random(source_.seed, RandomPurpose::kDataOrder, source_.content_hash + " cuts");
    shift_ = static_cast<int64_t>(random.bits64(epoch) % static_cast<uint64_t>(tokens_));
  }

  RowSource source_;
  int64_t tokens_;
  int64_t rows_;  // of an epoch; the last may be padded
  SourceCursor cursor_;
  std::optional<Permutation> order_;
  int64_t shift_ = 0;  // the place on the ring where row 0 begins
};

// Packs pieces into bins of `capacity` tokens, each into the fullest bin that has room for it.
std::vector<Row> pack_best_fit(std::vector<Piece> pieces, int64_t capacity) {
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.length > b.length; });
  std::vector<Row> rows;
  std::set<std::pair<int64_t, size_t>> room;  // (tokens left, row)
  for (const Piece& piece : pieces) {
    auto bin = room.lower_bound({piece.length, 0});
    if (bin == room.end()) {
      bin = room.emplace(capacity, rows.size()).first;
      rows.emplace_back();
    }
    const auto [left, row] = *bin;
    room.erase(bin);
    rows[row].pieces.push_back(piece);
    if (left > piece.length) room.emplace(left - piece.length, row);
  }
  for (const auto& [left, row] : room) rows[row].pieces.push_back({-1, 0, left});
  return rows;
}

class BestFitPacker : public Packer {
 public:
  BestFitPacker(RowSource source, SourceCursor cursor)
      : stream_(std::move(source), cursor), cursor_(cursor) {
    pack_window();
    if (cursor_.offset > static_cast<int64_t>(rows_.size())) {
      fail(ExitCode::kConfig, "data state: row {} of a packing window of {}", cursor_.offset,
           rows_.size());
    }
  }

  Row next() override {
    while (cursor_.offset == static_cast<int64_t>(rows_.size())) {
      cursor_ = {stream_.epoch(), stream_.position(), 0};
      pack_window();
    }
    return rows_[static_cast<size_t>(cursor_.offset++)];
  }

  SourceCursor cursor() const override { return cursor_; }

 private:
  // Large enough that little room is wasted at the end of a window.
  static constexpr int64_t kWindowRows = 256;

  // Packs documents until they fill kWindowRows rows or the epoch ends; the stream then stands
  // after them. A state holds the window's start, so a resumed run packs the window's rows again.
  void pack_window() {
    const int64_t capacity = stream_.source().row_tokens;
    std::vector<Piece> pieces;
    int64_t tokens = 0;
    do {
      const int64_t document = stream_.document();
      const int64_t length = stream_.length(document);
      for (int64_t begin = 0; begin < length; begin += capacity) {
        pieces.push_back({document, begin, std::min(capacity, length - begin)});
      }
      tokens += length;
      stream_.advance();
    } while (tokens < kWindowRows * capacity && stream_.position() != 0);

    // Best fit puts rows of long documents first and rows of short ones last.
    std::vector<Row> packed = pack_best_fit(std::move(pieces), capacity);
    const auto count = static_cast<int64_t>(packed.size());
    const std::string name =
        fmt::format("{} rows of window {}", stream_.source().content_hash, cursor_.position);
    const Permutation shuffle(stream_.source().seed, name, static_cast<uint64_t>(cursor_.epoch),
                              count);
    rows_.clear();
    for (int64_t i = 0; i < count; ++i) {
      rows_.push_back(std::move(packed[static_cast<size_t>(shuffle(i))]));
    }
  }

  DocumentStream stream_;
  SourceCursor cursor_;
  std::vector<Row> rows_;
};

// The token that the last token of `row.pieces[index]` predicts; -1: none.
int32_t target_behind(const Row& row, size_t index, const DocumentStore& store,
                      bool predict_across_documents) {
  const Piece& piece = row.pieces[index];
  const auto document = static_cast<size_t>(piece.document);
  const auto end = static_cast<int64_t>(store.offsets()[document]) + piece.begin + piece.length;
  int64_t at = -1;
  if (piece.begin + piece.length < store.length(piece.document)) {
    at = end;
  } else if (predict_across_documents) {
    int64_t next = row.next_document;
    if (index + 1 < row.pieces.size()) {
      const Piece& following = row.pieces[index + 1];
      next = following.begin == 0 ? following.document : -1;
    }
    if (next >= 0) at = static_cast<int64_t>(store.offsets()[static_cast<size_t>(next)]);
  }
  int32_t token = -1;
  if (at >= 0) store.read(at, {&token, 1});
  return token;
}

void append_segment(PackedBatch& batch, int64_t length) {
  const size_t begin = batch.tokens.size();
  const size_t end = begin + static_cast<size_t>(length);
  batch.tokens.resize(end, 0);
  batch.targets.resize(end, -1);
  for (int64_t i = 0; i < length; ++i) batch.positions.push_back(static_cast<int32_t>(i));
  batch.cu_seqlens.push_back(static_cast<int32_t>(end));
}

}  // namespace

std::unique_ptr<Packer> make_packer(Packing packing, RowSource source, SourceCursor cursor) {
  require(source.offsets.size() > 1 && source.offsets.back() > 0, "a source without tokens");
  require(source.row_tokens > 0, "rows of {} tokens", source.row_tokens);
  if (packing == Packing::kConcat) return std::make_unique<ConcatPacker>(std::move(source), cursor);
  return std::make_unique<BestFitPacker>(std::move(source), cursor);
}

void clear(PackedBatch& batch, int64_t tokens) {
  const auto room = static_cast<size_t>(tokens);
  for (auto* values : {&batch.tokens, &batch.targets, &batch.positions}) {
    values->clear();
    values->reserve(room);
  }
  batch.cu_seqlens.assign(1, 0);
  batch.valid_targets = 0;
}

void append_padding(PackedBatch& batch, int64_t length) {
  append_segment(batch, length);
}

void append_row(PackedBatch& batch, const Row& row, const DocumentStore& store,
                bool predict_across_documents) {
  for (size_t index = 0; index < row.pieces.size(); ++index) {
    const Piece& piece = row.pieces[index];
    if (piece.document < 0) {
      append_padding(batch, piece.length);
      continue;
    }
    const size_t begin = batch.tokens.size();
    append_segment(batch, piece.length);
    const auto first = static_cast<int64_t>(store.offsets()[static_cast<size_t>(piece.document)]);
    const std::span<int32_t> tokens(batch.tokens.data() + begin, static_cast<size_t>(piece.length));
    store.read(first + piece.begin, tokens);
    std::copy(tokens.begin() + 1, tokens.end(),
              batch.targets.begin() + static_cast<int64_t>(begin));
    batch.targets.back() = target_behind(row, index, store, predict_across_documents);
    batch.valid_targets += piece.length - (batch.targets.back() < 0 ? 1 : 0);
  }
}

}  // namespace sbtrain
