// Packs documents into rows of L tokens.
//
//   concat    The documents follow each other in the order of the file and are cut every L tokens.
//             The rows are seen in a permuted order, and each epoch cuts in other places. Only the
//             last row of an epoch may hold padding. A document that continues in the next row is
//             a segment of its own there: its positions start from 0 and it does not see the part
//             before.
//   best_fit  Documents of up to L tokens stay whole and are packed by best fit decreasing (Ding et
//             al., arXiv 2404.10830) within a window of the order. Longer ones are cut every L
//             tokens, and the rest is packed like a document. The end of a row may be padding.
//
// In both, each token of a source is in exactly one row of each epoch.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/batch.h"
#include "data/data_config.h"
#include "data/sample_order.h"

namespace sbtrain {

class DocumentStore;

// Tokens [begin, begin + length) of a document; document -1 is padding.
struct Piece {
  int64_t document = -1;
  int64_t begin = 0;
  int64_t length = 0;
  bool operator==(const Piece&) const = default;
};

// One row of a batch, before its tokens are read.
struct Row {
  int source = 0;
  std::vector<Piece> pieces;  // lengths add up to L
  // The document after the last piece in the source, if the piece ends its document; -1: none.
  // Only its first token matters, and only when predicting across documents.
  int64_t next_document = -1;
  int64_t tokens() const;  // without padding
};

// The position of a source's stream of rows.
struct SourceCursor {
  int64_t epoch = 0;
  int64_t position = 0;  // in the epoch's order: rows (concat), documents (best_fit)
  int64_t offset = 0;    // best_fit: rows already used of the window that starts there
  bool operator==(const SourceCursor&) const = default;
};

// The input of a source's packer. The order depends on the content's hash, not on the path or the
// place in the list of sources, so the same data gives the same order wherever it is stored.
struct RowSource {
  std::span<const uint64_t> offsets;  // [documents + 1], at least one token in all
  std::string content_hash;
  uint64_t seed = 0;
  int64_t row_tokens = 0;  // L
};

// An endless stream of rows of one source.
class Packer {
 public:
  virtual ~Packer() = default;
  virtual Row next() = 0;
  // The present position. A packer made from it continues with the same rows.
  virtual SourceCursor cursor() const = 0;
};

// Continues from `cursor`. Throws ExitCode::kConfig if it lies
// outside of the source.
std::unique_ptr<Packer> make_packer(Packing packing, RowSource source, SourceCursor cursor);

// Makes `batch` hold no rows, with room for `tokens` tokens.
void clear(PackedBatch& batch, int64_t tokens);

// Reads a row's tokens and appends it. The target of a token is the next token of its document. The
// last token of a document has no target, or with `predict_across_documents` the first token of the
// next document in the row or stream. Padding is token 0 without a target, in its own segment.
void append_row(PackedBatch& batch, const Row& row, const DocumentStore& store,
                bool predict_across_documents);

// Appends a segment of `length` padding tokens.
void append_padding(PackedBatch& batch, int64_t length);

}  // namespace sbtrain
