#include "eval/perplexity.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/number_text.h"
#include "data/document_store.h"

namespace sbtrain {

double Perplexity::loss() const {
  return tokens > 0 ? without_nan_sign(loss_sum / static_cast<double>(tokens))
                    : std::numeric_limits<double>::quiet_NaN();
}

void check_fits(const DocumentStore& store, const HeldOutOptions& options,
                const Tokenizer* tokenizer) {
  const StoreInfo& info = store.info();
  check_vocab(store, options.vocab);
  if (!options.tokenizer_hash.empty() && info.tokenizer_hash != options.tokenizer_hash) {
    fail(ExitCode::kConfig,
         "{} was prepared with another tokenizer (sha256 {:.12}) than the training data ({:.12})",
         store.path(), info.tokenizer_hash, options.tokenizer_hash);
  }
  if (tokenizer != nullptr && info.tokenizer_hash != tokenizer->hash()) {
    fail(ExitCode::kConfig, "{} was prepared with another tokenizer than {}", store.path(),
         tokenizer->path());
  }
}

namespace {

__extension__ using Wide = __int128;

// The part of `max_tokens`, for stores of `all` tokens together, that falls to one of `tokens`: all
// of them where the part suffices for everything, exactly, so that no store loses its last row.
int64_t part_of(int64_t tokens, int64_t all, int64_t max_tokens) {
  if (max_tokens >= all) return std::max<int64_t>(1, tokens);
  return std::max<int64_t>(1, static_cast<int64_t>(Wide{tokens} * max_tokens / all));
}

}  // namespace

HeldOut::HeldOut(const HeldOutOptions& options) {
  int64_t all_tokens = 0;
  for (const std::string& path : options.paths) all_tokens += DocumentStore(path).tokens();
  if (!options.tokenizer.empty()) tokenizer_.emplace(options.tokenizer);
  for (const std::string& path : options.paths) {
    auto reader = std::make_unique<ValidationReader>(
        path, options.sequence_length, options.micro_batch,
        part_of(DocumentStore(path).tokens(), all_tokens, options.max_tokens),
        options.predict_across_documents, options.rank, options.world);
    check_fits(reader->store(), options, tokenizer_ ? &*tokenizer_ : nullptr);
    batches_ += reader->batches();
    readers_.push_back(std::move(reader));
  }
}

PackedBatch HeldOut::batch(int64_t i) const {
  require(i >= 0 && i < batches_, "validation batch {} of {}", i, batches_);
  size_t reader = 0;
  for (; i >= readers_[reader]->batches(); ++reader) i -= readers_[reader]->batches();
  return readers_[reader]->batch(i);
}

int64_t HeldOut::bytes(const PackedBatch& batch) const {
  int64_t bytes = 0;
  if (!tokenizer_) return bytes;
  for (const int32_t target : batch.targets) {
    if (target >= 0) bytes += tokenizer_->byte_length(target);
  }
  return bytes;
}

}  // namespace sbtrain
