// Loss on windows of documents, each of which is a context of its own: windows of several lengths,
// and windows that slide over whole documents.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/batch.h"
#include "data/document_store.h"
#include "eval/perplexity.h"
#include "eval/recall.h"
#include "job/control.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {

// Tokens [begin, begin + length) of a document. The target of each is the next token; the first
// `skip` targets do not count.
struct Window {
  size_t store = 0;
  int64_t document = 0;
  int64_t begin = 0;
  int64_t length = 0;
  int64_t skip = 0;
  bool operator==(const Window&) const = default;
};

// The loss (nats) of each token of a batch, 0 if it has no target. `max_seqlen` bounds the
// lengths of its documents.
using TokenLosses = std::function<std::vector<float>(const PackedBatch& batch, int64_t max_seqlen)>;

// Sums over the counted targets of one document.
struct DocumentScore {
  size_t store = 0;
  int64_t document = 0;
  double loss_sum = 0;  // nats
  int64_t tokens = 0;
};

// Sums over the counted targets.
struct WindowScores {
  Perplexity total;
  Recall recall;
  std::vector<double> loss_sum_L;  // by position in the window
  std::vector<int64_t> tokens_L;
  std::vector<DocumentScore> by_document;  // in the order of stores and documents
  int64_t windows = 0;
  int64_t documents = 0;  // that the windows come from

  // Calls f with each sum over targets (eval/rank_sums.h).
  void visit(const auto& f) {
    total.visit(f);
    recall.visit(f);
    for (double& sum : loss_sum_L) f(sum);
    for (int64_t& count : tokens_L) f(count);
    for (DocumentScore& document : by_document) {
      f(document.loss_sum);
      f(document.tokens);
    }
  }
};

// Mean losses of `bin` positions each; NaN for a bin without targets.
std::vector<double> binned_losses(const WindowScores& scores, int64_t bin);

// Cuts windows from document stores.
class WindowReader {
 public:
  // Opens, checks and verifies everything; throws the same errors as HeldOut. Uses only paths,
  // tokenizer, tokenizer_hash and vocab of `options`.
  explicit WindowReader(const HeldOutOptions& options);

  bool empty() const { return stores_.empty(); }
  int64_t tokens() const;            // in all stores
  int64_t longest_document() const;  // in tokens
  // Of each store, the SHA-256 of its tokens and of where its documents end, hexadecimal.
  std::vector<std::string> content_hashes() const;

  // Windows of exactly `length` tokens, cut one after the other from the start of each document
  // that is long enough: as many as max_tokens allows, but at least one if there is any, spread
  // evenly over all such windows. All their targets count.
  std::vector<Window> of_length(int64_t length, int64_t max_tokens) const;

  // The last `length` tokens of each window, of which the last `targets` targets count: this gives
  // the same targets contexts of different lengths.
  static std::vector<Window> last_tokens(std::vector<Window> windows, int64_t length,
                                         int64_t targets);

  // Windows for the last `targets` targets of each window, in groups that are small beside
  // `context`, so that every target is predicted from at most `context` tokens, and from more than
  // 7/8 of them where the window has so many before it. With a context of all the window's tokens
  // every target sees all that the window has before it.
  static std::vector<Window> last_targets(std::span<const Window> windows, int64_t targets,
                                          int64_t context);

  // Windows of up to `length` tokens over whole documents, each `stride` tokens after the previous
  // one. Every token but the first of a document is predicted once, from at least length - stride
  // tokens if the document has as many before it. If max_tokens is less than all documents need,
  // documents are chosen evenly over the stores, and the last one is cut off.
  std::vector<Window> sliding(int64_t length, int64_t stride, int64_t max_tokens) const;

  // A batch of these windows. It is padded to a multiple of max_seqlen tokens, so that there are
  // few different sizes, which matters because kernels may be built for each size.
  PackedBatch batch_of(std::span<const Window> windows, int64_t max_seqlen) const;

  // Scores the windows, as many at once as `tokens_at_once` allows, but at least one. The batches
  // are dealt to the ranks, and the scores have the same bits for any number of them. `max_seqlen`
  // is passed to `losses`.
  WindowScores score(Control& ranks, const std::vector<Window>& windows, int64_t tokens_at_once,
                     int64_t max_seqlen, const TokenLosses& losses) const;

 private:
  void append(PackedBatch& batch, const Window& window) const;
  std::vector<std::unique_ptr<DocumentStore>> stores_;
  std::optional<Tokenizer> tokenizer_;
};

}  // namespace sbtrain
