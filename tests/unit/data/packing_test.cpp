#include "data/packing.h"

#include <map>

#include "unit/data/stores.h"

namespace sbtrain::test {
namespace {

std::vector<uint64_t> offsets_of(const std::vector<int64_t>& lengths) {
  std::vector<uint64_t> offsets = {0};
  for (const int64_t length : lengths) {
    offsets.push_back(offsets.back() + static_cast<uint64_t>(length));
  }
  return offsets;
}

std::vector<int64_t> random_lengths(uint64_t seed, int count, int64_t longest) {
  const Philox random(seed, RandomPurpose::kTest, "lengths");
  std::vector<int64_t> lengths;
  for (int i = 0; i < count; ++i) {
    // Many documents are short, some are far longer than a row, some are empty.
    const double u = random.uniform(static_cast<uint64_t>(i));
    lengths.push_back(static_cast<int64_t>(static_cast<double>(longest) * u * u * u));
  }
  lengths.back() = longest;
  return lengths;
}

std::unique_ptr<Packer> packer(Packing packing, const std::vector<uint64_t>& offsets,
                               int64_t row_tokens, SourceCursor cursor = {}) {
  return make_packer(packing,
                     {.offsets = offsets, .content_hash = "h", .seed = 9, .row_tokens = row_tokens},
                     cursor);
}

class PackingTest : public ::testing::TestWithParam<Packing> {};

TEST_P(PackingTest, EachTokenOnceInEachEpoch) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const int64_t row_tokens = std::vector<int64_t>{1, 7, 64, 256}[seed % 4];
    const int count = 1 + static_cast<int>(seed * seed * 9);
    const auto lengths = random_lengths(seed, count, 900);
    const auto offsets = offsets_of(lengths);
    const auto total = static_cast<int64_t>(offsets.back());
    const auto p = packer(GetParam(), offsets, row_tokens);
    // Tokens come epoch by epoch, so the first 3 * total of them are 3 epochs.
    std::vector<int> times(offsets.back());
    int64_t tokens = 0;
    int64_t epoch = 1;
    while (epoch <= 3) {
      const Row row = p->next();
      int64_t length = 0;
      for (const Piece& piece : row.pieces) {
        length += piece.length;
        ASSERT_GT(piece.length, 0);
        if (piece.document < 0) continue;
        ASSERT_LE(piece.begin + piece.length, lengths[static_cast<size_t>(piece.document)]);
        for (int64_t i = 0; i < piece.length; ++i) {
          const uint64_t at =
              offsets[static_cast<size_t>(piece.document)] + static_cast<uint64_t>(piece.begin + i);
          ++times[at];
          if (++tokens == epoch * total) {
            for (const int n : times) ASSERT_EQ(n, epoch);
            ++epoch;
          }
        }
      }
      ASSERT_EQ(length, row_tokens);
    }
  }
}

TEST_P(PackingTest, GoesOnFromEveryCursor) {
  const auto offsets = offsets_of(random_lengths(3, 150, 400));
  const auto whole = packer(GetParam(), offsets, 48);
  for (int i = 0; i < 900; ++i) {
    const auto resumed = packer(GetParam(), offsets, 48, whole->cursor());
    ASSERT_EQ(resumed->cursor(), whole->cursor());
    const Row row = whole->next();
    const Row same = resumed->next();
    ASSERT_EQ(row.pieces, same.pieces);
    ASSERT_EQ(row.next_document, same.next_document);
    ASSERT_EQ(resumed->cursor(), whole->cursor());
  }
  EXPECT_GT(whole->cursor().epoch, 1);
}

TEST_P(PackingTest, RefusesImpossibleCursors) {
  const auto offsets = offsets_of({5, 6, 7});
  for (const SourceCursor cursor : {SourceCursor{0, 18, 0}, SourceCursor{-1, 0, 0},
                                    SourceCursor{0, -1, 0}, SourceCursor{0, 0, -1}}) {
    EXPECT_EQ(thrown_by([&] { packer(GetParam(), offsets, 4, cursor); }).code, ExitCode::kConfig);
  }
}

INSTANTIATE_TEST_SUITE_P(Both, PackingTest, ::testing::Values(Packing::kConcat, Packing::kBestFit));

TEST(BestFit, KeepsDocumentsWholeAndPadsLittle) {
  const int64_t row_tokens = 256;
  const auto lengths = random_lengths(21, 6000, 1000);
  const auto offsets = offsets_of(lengths);
  const auto p = packer(Packing::kBestFit, offsets, row_tokens);
  int64_t padding = 0;
  int64_t tokens = 0;
  for (; p->cursor().epoch == 0;) {
    const Row row = p->next();
    for (const Piece& piece : row.pieces) {
      if (piece.document < 0) {
        padding += piece.length;
        continue;
      }
      tokens += piece.length;
      const int64_t length = lengths[static_cast<size_t>(piece.document)];
      EXPECT_EQ(piece.begin % row_tokens, 0);
      EXPECT_EQ(piece.length, std::min(row_tokens, length - piece.begin));
    }
  }
  EXPECT_LT(static_cast<double>(padding), 0.02 * static_cast<double>(tokens));
}

// Computes from the rows, in a slow and simple way, what the batch must be.
TEST(AppendRow, MatchesBruteForce) {
  const TemporaryFolder folder;
  const std::string path = folder / "a.h5";
  const auto lengths = random_lengths(5, 120, 150);
  const Documents documents = numbered_documents(lengths);  // token = place in the store
  write_store(path, documents, 1 << 20);
  const DocumentStore store(path);
  const std::vector<uint64_t> offsets(store.offsets().begin(), store.offsets().end());
  const int64_t row_tokens = 32;
  for (const Packing packing : {Packing::kConcat, Packing::kBestFit}) {
    for (const bool across : {false, true}) {
      std::vector<Row> rows;
      const auto p = packer(packing, offsets, row_tokens);
      for (int i = 0; i < 300; ++i) rows.push_back(p->next());
      for (size_t r = 0; r + 2 < rows.size(); r += 2) {
        PackedBatch batch;
        clear(batch, 2 * row_tokens);
        append_row(batch, rows[r], store, across);
        append_row(batch, rows[r + 1], store, across);
        std::vector<Piece> pieces = rows[r].pieces;
        const size_t first_row_pieces = pieces.size();
        pieces.insert(pieces.end(), rows[r + 1].pieces.begin(), rows[r + 1].pieces.end());
        pieces.push_back({});
        size_t at = 0;
        int64_t valid = 0;
        for (size_t n = 0; n + 1 < pieces.size(); ++n) {
          ASSERT_EQ(batch.cu_seqlens[n], static_cast<int32_t>(at));
          const Piece& piece = pieces[n];
          const Piece& following = pieces[n + 1];
          for (int64_t i = 0; i < piece.length; ++i, ++at) {
            ASSERT_EQ(batch.positions[at], i);
            if (piece.document < 0) {
              ASSERT_EQ(batch.tokens[at], 0);
              ASSERT_EQ(batch.targets[at], -1);
              continue;
            }
            const auto& document = documents[static_cast<size_t>(piece.document)];
            const auto k = static_cast<size_t>(piece.begin + i);
            ASSERT_EQ(batch.tokens[at], document[k]);
            int32_t target = k + 1 < document.size() ? document[k + 1] : -1;
            const bool row_ends = n + 1 == first_row_pieces || n + 2 == pieces.size();
            if (target < 0 && across && !row_ends && following.document >= 0 &&
                following.begin == 0) {
              target = documents[static_cast<size_t>(following.document)][0];
            }
            // A row of concat is followed by the next token of the source, taken as a ring.
            if (target < 0 && across && row_ends && packing == Packing::kConcat) {
              auto next = static_cast<size_t>(piece.document);
              do next = (next + 1) % documents.size();
              while (documents[next].empty());
              target = documents[next][0];
            }
            ASSERT_EQ(batch.targets[at], target)
                << name_of(packing) << " row " << r << " token " << at;
            valid += target >= 0 ? 1 : 0;
          }
        }
        ASSERT_EQ(batch.cu_seqlens.size(), pieces.size());
        ASSERT_EQ(batch.cu_seqlens.back(), 2 * row_tokens);
        ASSERT_EQ(batch.tokens.size(), static_cast<size_t>(2 * row_tokens));
        ASSERT_EQ(batch.valid_targets, valid);
      }
    }
  }
}

}  // namespace
}  // namespace sbtrain::test
