#include "eval/windows.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>

#include "core/error.h"
#include "data/packing.h"
#include "eval/rank_sums.h"

namespace sbtrain {
namespace {

void add_losses(WindowScores& scores, const PackedBatch& batch, std::span<const float> losses_T,
                const Tokenizer* tokenizer) {
  for (size_t t = 0; t < batch.targets.size(); ++t) {
    if (batch.targets[t] < 0) continue;
    const auto position = static_cast<size_t>(batch.positions[t]);
    scores.total.loss_sum += losses_T[t];
    ++scores.total.tokens;
    if (tokenizer != nullptr) scores.total.bytes += tokenizer->byte_length(batch.targets[t]);
    scores.loss_sum_L[position] += losses_T[t];
    ++scores.tokens_L[position];
  }
  scores.recall.add(batch, losses_T);
}

// The documents of the windows, without any loss yet.
std::vector<DocumentScore> documents_of(std::span<const Window> windows) {
  std::map<std::pair<size_t, int64_t>, DocumentScore> documents;
  for (const Window& window : windows) {
    documents[{window.store, window.document}] = {.store = window.store,
                                                  .document = window.document};
  }
  std::vector<DocumentScore> ordered;
  for (const auto& [place, document] : documents) ordered.push_back(document);
  return ordered;
}

// Adds the losses of a batch that begins with these windows to those of their documents.
void add_by_document(std::vector<DocumentScore>& documents, std::span<const Window> windows,
                     const PackedBatch& batch, std::span<const float> losses_T) {
  size_t t = 0;
  for (const Window& window : windows) {
    const auto place = std::pair(window.store, window.document);
    DocumentScore& document = *std::ranges::lower_bound(
        documents, place, {},
        [](const DocumentScore& d) { return std::pair(d.store, d.document); });
    for (const size_t end = t + static_cast<size_t>(window.length); t < end; ++t) {
      if (batch.targets[t] < 0) continue;
      document.loss_sum += losses_T[t];
      ++document.tokens;
    }
  }
}

// The windows in parts of up to `room` tokens, of at least one window each.
std::vector<std::span<const Window>> batches_of(std::span<const Window> windows, int64_t room) {
  std::vector<std::span<const Window>> batches;
  for (size_t next = 0; next < windows.size();) {
    const size_t first = next;
    int64_t tokens = 0;
    do {
      tokens += windows[next++].length;
    } while (next < windows.size() && tokens + windows[next].length <= room);
    batches.push_back(windows.subspan(first, next - first));
  }
  return batches;
}

}  // namespace

std::vector<double> binned_losses(const WindowScores& scores, int64_t bin) {
  const auto positions = static_cast<int64_t>(scores.tokens_L.size());
  std::vector<double> means;
  for (int64_t begin = 0; begin < positions; begin += bin) {
    const int64_t end = std::min(begin + bin, positions);
    const double loss =
        std::accumulate(scores.loss_sum_L.begin() + begin, scores.loss_sum_L.begin() + end, 0.0);
    const int64_t tokens =
        std::accumulate(scores.tokens_L.begin() + begin, scores.tokens_L.begin() + end, int64_t{0});
    means.push_back(tokens > 0 ? loss / static_cast<double>(tokens)
                               : std::numeric_limits<double>::quiet_NaN());
  }
  return means;
}

WindowReader::WindowReader(const HeldOutOptions& options) {
  if (!options.tokenizer.empty()) tokenizer_.emplace(options.tokenizer);
  for (const std::string& path : options.paths) {
    auto store = std::make_unique<DocumentStore>(path);
    check_fits(*store, options, tokenizer_ ? &*tokenizer_ : nullptr);
    store->verify();
    stores_.push_back(std::move(store));
  }
}

int64_t WindowReader::tokens() const {
  int64_t sum = 0;
  for (const auto& store : stores_) sum += store->tokens();
  return sum;
}

int64_t WindowReader::longest_document() const {
  int64_t longest = 0;
  for (const auto& store : stores_) {
    for (int64_t n = 0; n < store->documents(); ++n) longest = std::max(longest, store->length(n));
  }
  return longest;
}

std::vector<std::string> WindowReader::content_hashes() const {
  std::vector<std::string> hashes;
  for (const auto& store : stores_) hashes.push_back(store->info().content_hash);
  return hashes;
}

std::vector<Window> WindowReader::of_length(int64_t length, int64_t max_tokens) const {
  std::vector<Window> all;
  for (size_t s = 0; s < stores_.size(); ++s) {
    for (int64_t n = 0; n < stores_[s]->documents(); ++n) {
      for (int64_t begin = 0; begin + length <= stores_[s]->length(n); begin += length) {
        all.push_back({.store = s, .document = n, .begin = begin, .length = length});
      }
    }
  }
  const auto found = static_cast<int64_t>(all.size());
  const int64_t count = std::min(found, std::max<int64_t>(1, max_tokens / length));
  std::vector<Window> chosen;
  for (int64_t i = 0; i < count; ++i) chosen.push_back(all[static_cast<size_t>(i * found / count)]);
  return chosen;
}

std::vector<Window> WindowReader::last_tokens(std::vector<Window> windows, int64_t length,
                                              int64_t targets) {
  for (Window& window : windows) {
    require(targets <= length && length <= window.length, "{} targets of {} tokens of {}", targets,
            length, window.length);
    window.begin += window.length - length;
    window.length = length;
    window.skip = length - targets;
  }
  return windows;
}

std::vector<Window> WindowReader::last_targets(std::span<const Window> windows, int64_t targets,
                                               int64_t context) {
  const int64_t group = std::clamp<int64_t>(context / 8, 1, targets);
  std::vector<Window> parts;
  for (const Window& window : windows) {
    require(targets <= window.length && context <= window.length,
            "{} targets with {} tokens of context in a window of {}", targets, context,
            window.length);
    const int64_t last = window.begin + window.length;
    for (int64_t first = last - targets; first < last; first += group) {
      Window part = window;
      const int64_t end = std::min(first + group, last);
      part.begin = std::max(window.begin, end - context);
      part.length = end - part.begin;
      part.skip = first - part.begin;
      parts.push_back(part);
    }
  }
  return parts;
}

std::vector<Window> WindowReader::sliding(int64_t length, int64_t stride,
                                          int64_t max_tokens) const {
  require(stride > 0 && stride <= length, "windows of {} tokens every {}", length, stride);
  struct Document {
    size_t store;
    int64_t index, tokens;
  };
  std::vector<Document> all;
  for (size_t s = 0; s < stores_.size(); ++s) {
    for (int64_t n = 0; n < stores_[s]->documents(); ++n) {
      if (stores_[s]->length(n) > 1) all.push_back({s, n, stores_[s]->length(n)});
    }
  }
  const auto found = static_cast<int64_t>(all.size());
  if (found == 0) return {};
  int64_t step = found * 618 / 1000 + 1;  // by the golden ratio, any part of the walk is even
  while (std::gcd(step, found) != 1) ++step;
  std::vector<Window> windows;
  int64_t left = max_tokens;  // targets
  for (int64_t i = 0; i < found && left > 0; ++i) {
    const Document& document = all[static_cast<size_t>(i * step % found)];
    const int64_t inputs = std::min(document.tokens - 1, left);
    left -= inputs;
    int64_t done = 0;  // inputs whose targets are predicted
    for (int64_t begin = 0; done < inputs; begin += stride) {
      const int64_t end = std::min(begin + length, inputs);
      windows.push_back({.store = document.store,
                         .document = document.index,
                         .begin = begin,
                         .length = end - begin,
                         .skip = done - begin});
      done = end;
    }
  }
  return windows;
}

void WindowReader::append(PackedBatch& batch, const Window& window) const {
  const size_t first = batch.targets.size();
  append_row(batch, {.source = 0, .pieces = {{window.document, window.begin, window.length}}},
             *stores_[window.store], /*predict_across_documents=*/false);
  for (size_t t = first; t < first + static_cast<size_t>(window.skip); ++t) {
    batch.valid_targets -= batch.targets[t] >= 0;
    batch.targets[t] = -1;
  }
}

PackedBatch WindowReader::batch_of(std::span<const Window> windows, int64_t max_seqlen) const {
  PackedBatch batch;
  int64_t tokens = 0;
  for (const Window& window : windows) tokens += window.length;
  clear(batch, (tokens + max_seqlen - 1) / max_seqlen * max_seqlen);
  for (const Window& window : windows) append(batch, window);
  if (tokens % max_seqlen > 0) append_padding(batch, max_seqlen - tokens % max_seqlen);
  return batch;
}

WindowScores WindowReader::score(Control& ranks, const std::vector<Window>& windows,
                                 int64_t tokens_at_once, int64_t max_seqlen,
                                 const TokenLosses& losses) const {
  WindowScores zero;
  zero.loss_sum_L.resize(static_cast<size_t>(max_seqlen));
  zero.tokens_L.resize(static_cast<size_t>(max_seqlen));
  zero.by_document = documents_of(windows);
  const std::vector<std::span<const Window>> groups =
      batches_of(windows, std::max<int64_t>(1, tokens_at_once / max_seqlen) * max_seqlen);
  const auto of_batch = [&](int64_t i) {
    WindowScores scores = zero;
    const std::span<const Window> group = groups[static_cast<size_t>(i)];
    const PackedBatch batch = batch_of(group, max_seqlen);
    const std::vector<float> losses_T = losses(batch, max_seqlen);
    add_losses(scores, batch, losses_T, tokenizer_ ? &*tokenizer_ : nullptr);
    add_by_document(scores.by_document, group, batch, losses_T);
    return scores;
  };
  for (const Window& window : windows) {
    require(window.length <= max_seqlen, "a window of {} tokens, more than {}", window.length,
            max_seqlen);
  }
  WindowScores scores =
      sum_over_ranks<WindowScores>(ranks, static_cast<int64_t>(groups.size()), zero, of_batch);
  scores.windows = static_cast<int64_t>(windows.size());
  scores.documents = static_cast<int64_t>(scores.by_document.size());
  return scores;
}

}  // namespace sbtrain
