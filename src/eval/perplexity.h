// Loss, perplexity and bits per byte on held-out text.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "data/batch.h"
#include "data/loader.h"
#include "tokenizer/tokenizer.h"

namespace sbtrain {

struct Perplexity {
  double loss_sum = 0;  // nats over all predicted tokens
  int64_t tokens = 0;   // predicted
  int64_t bytes = 0;    // of the text of those tokens; 0: unknown
  double loss() const;  // nats per predicted token; NaN without any

  // Calls f with each sum (eval/rank_sums.h).
  void visit(const auto& f) {
    f(loss_sum);
    f(tokens);
    f(bytes);
  }
};

struct HeldOutOptions {
  std::vector<std::string> paths;  // HDF5 document stores
  std::string tokenizer;           // of the data, for bytes; empty: bytes stay unknown
  std::string tokenizer_hash;      // of the training data's tokenizer; empty: unknown
  int64_t vocab = 0;               // of the model
  int64_t sequence_length = 0;
  int64_t micro_batch = 1;
  int64_t max_tokens = 0;  // in all stores together, split among them by their sizes
  bool predict_across_documents = false;
  int rank = 0;  // takes the batches rank, rank + world, ... of each store
  int world = 1;
};

// Throws ExitCode::kConfig if the store's vocabulary is larger than the model's, or if the store
// was made with another tokenizer than the training data or `tokenizer`, where these are known.
void check_fits(const DocumentStore& store, const HeldOutOptions& options,
                const Tokenizer* tokenizer);

// Held-out text, in the same batches at every use.
class HeldOut {
 public:
  // Opens and checks everything. Throws ExitCode::kData for a damaged file, ExitCode::kConfig as
  // check_fits does.
  explicit HeldOut(const HeldOutOptions& options);

  bool empty() const { return readers_.empty(); }

  // Batches of this rank: as many as every other rank has, so that some may have no valid targets.
  int64_t batches() const { return batches_; }
  PackedBatch batch(int64_t i) const;
  // UTF-8 bytes of the text of a batch's valid targets; 0 without a tokenizer.
  int64_t bytes(const PackedBatch& batch) const;

 private:
  int64_t batches_ = 0;
  std::vector<std::unique_ptr<ValidationReader>> readers_;
  std::optional<Tokenizer> tokenizer_;
};

}  // namespace sbtrain
