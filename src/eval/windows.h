// Loss on windows of documents, each a context of its own: by length of the context, and sliding
// over whole documents.
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
#include "data/tokenizer.h"
#include "eval/perplexity.h"
#include "eval/recall.h"

namespace sbtrain {

// Tokens [begin, begin + length) of a document, whose targets are the tokens behind each of them;
// the first `skip` targets do not count.
struct Window {
  size_t store = 0;
  int64_t document = 0;
  int64_t begin = 0;
  int64_t length = 0;
  int64_t skip = 0;
  bool operator==(const Window&) const = default;
};

// The loss (nats) of each token of a batch, 0 where it has no target. `max_seqlen` bounds the
// lengths of its documents.
using TokenLosses = std::function<std::vector<float>(const PackedBatch& batch, int64_t max_seqlen)>;

// What is summed up over the counted targets.
struct WindowScores {
  Perplexity total;
  Recall recall;
  std::vector<double> loss_sum_L;  // by position in the window
  std::vector<int64_t> tokens_L;
  int64_t windows = 0;
  int64_t documents = 0;  // that they come from
};

// Mean losses of `bin` positions each; NaN for a bin without targets.
std::vector<double> binned_losses(const WindowScores& scores, int64_t bin);

// Document stores to cut windows from.
class WindowReader {
 public:
  // Opens, checks and verifies everything; throws as HeldOut does. Of `options`, paths, tokenizer
  // and vocab count.
  explicit WindowReader(const HeldOutOptions& options);

  bool empty() const { return stores_.empty(); }
  int64_t tokens() const;            // in all stores
  int64_t longest_document() const;  // in tokens

  // Windows of exactly `length` tokens from documents that have as many, one beside the other from
  // the documents' starts: as many as max_tokens allow, but at least one if there is any, spread
  // evenly over all. Every one of their targets counts.
  std::vector<Window> of_length(int64_t length, int64_t max_tokens) const;

  // Each window's last `length` tokens, of which the last `targets` targets count: contexts of
  // different lengths for the same targets.
  static std::vector<Window> last_tokens(std::vector<Window> windows, int64_t length,
                                         int64_t targets);

  // Windows of up to `length` tokens, each `stride` tokens behind the last, over whole documents:
  // every token but the documents' first is predicted once, from at least length - stride tokens
  // where there are as many. Where max_tokens do not reach for all documents, they are
  // spread evenly over the stores, and the last is cut off.
  std::vector<Window> sliding(int64_t length, int64_t stride, int64_t max_tokens) const;

  // Runs the windows, as many at once as `tokens_at_once` allows but at least one. `max_seqlen`
  // goes to `losses`.
  WindowScores score(const std::vector<Window>& windows, int64_t tokens_at_once, int64_t max_seqlen,
                     const TokenLosses& losses) const;

 private:
  void append(PackedBatch& batch, const Window& window) const;
  std::vector<std::unique_ptr<DocumentStore>> stores_;
  std::optional<Tokenizer> tokenizer_;
};

}  // namespace sbtrain
