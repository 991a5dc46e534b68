// Micro-batches for one rank, prepared ahead of training by a separate thread.
//
// All ranks share one order of rows: each optimizer step takes the next `batch` rows, and rank r of
// w takes rows [r batch/w, (r+1) batch/w) of them. Every rank computes the whole order, which needs
// no reading, so the world size decides only which rank reads a row.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "data/batch.h"
#include "data/data_config.h"
#include "data/document_store.h"
#include "data/mixture.h"
#include "data/packing.h"
#include "data/task.h"

namespace sbtrain {

struct LoaderOptions {
  std::vector<SourceConfig> sources;  // of the stage
  TaskConfig task{};                  // in place of sources
  int64_t task_vocab = 0;
  Packing packing = Packing::kConcat;
  bool predict_across_documents = false;
  int64_t sequence_length = 0;  // L
  int64_t micro_batch = 1;      // rows in one PackedBatch
  int64_t batch = 1;            // rows in one optimizer step, all ranks together
  uint64_t seed = 1;
  int rank = 0;
  int world = 1;
  int64_t stage = 0;     // index; one above the state's starts the mixture of a new stage
  int64_t prefetch = 4;  // micro-batches prepared ahead
  // Fields that may differ from the state's, by the names that error messages use: "seed",
  // "train.batch", "data.sources.0.content_hash", ...
  std::vector<std::string> accept_changes;
};

// The position in the order of rows, which a checkpoint keeps. It consists of counters and
// fingerprints only, and fits any world size if `micro` is 0, that is between optimizer steps.
struct LoaderState {
  struct Source {
    std::string path;  // for messages; a moved file is still the same source
    std::string content_hash;
    int64_t documents = 0;
    int64_t tokens = 0;
    double weight = 1;
    bool active = true;  // in the mixture of the current stage
    SourceCursor cursor;
    int64_t taken = 0;  // tokens in the current stage, for the mixture
    bool operator==(const Source&) const = default;
  };
  uint64_t seed = 0;
  std::string packing;
  bool predict_across_documents = false;
  int64_t sequence_length = 0;
  int64_t batch = 0;
  int64_t stage = 0;
  int64_t step = 0;         // optimizer steps whose rows are all taken
  int64_t micro = 0;        // micro-batches taken of the next step
  int64_t micro_batch = 0;  // rows of the micro-batches that `micro` counts
  int64_t world = 0;        // ranks, each of which takes `micro` micro-batches
  // The tokenizer of all sources; empty for tasks, and for a state whose version does not record
  // it.
  std::string tokenizer_hash;
  bool starts_with_bos = false;  // the documents of every source start with bos
  std::vector<Source> sources;
  bool operator==(const LoaderState&) const = default;

  std::string to_json() const;
  // Throws ExitCode::kData naming the key.
  static LoaderState from_json(std::string_view json);
};

// The hash of the tokenizer that all sources were prepared with; empty without sources. Opens each
// store. Throws ExitCode::kConfig if the tokenizers differ, ExitCode::kData for a store that is
// missing or damaged.
std::string common_tokenizer(const std::vector<SourceConfig>& sources);

class Loader {
 public:
  // Opens and checks the sources and starts to prepare batches. Sources of up to kEagerBytes are
  // verified as a whole before anything is used, larger ones block by block when first read.
  // With a state it continues exactly where that state was taken. Throws
  //   ExitCode::kConfig  for a task that does not fit its sequences, a batch that is not divisible
  //                      by world * micro_batch, sources of different tokenizers, and a state of
  //                      other data or settings (the message names all fields)
  //   ExitCode::kData    for a source that is missing, unfinished or damaged (the file is named)
  explicit Loader(LoaderOptions options, const LoaderState* state = nullptr);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next micro-batch of micro_batch * sequence_length tokens; waits for it if necessary.
  // Rethrows an exception of the thread that prepares it. For use by one thread at a time.
  PackedBatch next();

  // The state after the micro-batch that next() returned last; batches prepared ahead do not count.
  LoaderState state() const;

  int64_t micro_batches_per_step() const;  // of this rank
  int64_t vocab() const { return task_ ? options_.task_vocab : stores_.front()->info().vocab; }
  // Throws as check_vocab() of a store does; a task has the vocabulary of its model.
  void check_vocab(int64_t of_model) const {
    if (!task_) sbtrain::check_vocab(*stores_.front(), of_model);
  }
  const std::string& tokenizer_hash() const { return stores_.front()->info().tokenizer_hash; }
  // The number of calls of next() that found nothing ready; the first call always counts.
  int64_t waits() const { return waits_; }

  static constexpr int64_t kEagerBytes = int64_t{2} << 30;

 private:
  // The part of the state that changes, for active sources only.
  struct Progress {
    int64_t step = 0;
    int64_t micro = 0;
    std::vector<SourceCursor> cursors;
    std::vector<int64_t> taken;
  };
  struct Item {
    PackedBatch batch;
    Progress after;
  };

  void check_options() const;
  void open_sources();
  LoaderState fresh_state() const;
  LoaderState::Source task_source() const;
  std::unique_ptr<Packer> packer(size_t source) const;
  void restore(const LoaderState& state);
  void check_same_data(const LoaderState& state) const;
  void start_packers();
  std::vector<Row> plan_step();
  Progress progress(int64_t step, int64_t micro) const;
  PackedBatch read_batch(const std::vector<Row>& rows, int64_t first) const;
  void produce();
  bool push(Item item);

  LoaderOptions options_;
  std::vector<std::unique_ptr<DocumentStore>> stores_;
  std::unique_ptr<Task> task_;  // if set, there are no stores
  LoaderState base_;            // settings, fingerprints and sources that are not active
  Progress consumed_;           // after the batch that next() returned last

  // Used by the producer only.
  std::vector<std::unique_ptr<Packer>> packers_;
  std::unique_ptr<Mixture> mixture_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Item> ready_;
  std::exception_ptr error_;
  bool stop_ = false;
  int64_t waits_ = 0;  // used by the consumer only
  std::thread producer_;
};

// Held-out text in batches: rows of L tokens, evenly spread over the store, the same every time.
class ValidationReader {
 public:
  // Takes all rows, the last of which may be shorter than L, if `max_tokens` reaches to the store's
  // end; otherwise as many whole rows as fit into `max_tokens`, but at least one. Each rank gets
  // its own part and the same number of batches; the last may be padding only. Verifies the store.
  ValidationReader(const std::string& path, int64_t sequence_length, int64_t micro_batch,
                   int64_t max_tokens, bool predict_across_documents = false, int rank = 0,
                   int world = 1);

  int64_t batches() const { return batches_; }  // on this rank
  int64_t rows() const { return rows_; }        // on all ranks
  // Batch i of micro_batch * L tokens.
  PackedBatch batch(int64_t i) const;
  const DocumentStore& store() const { return store_; }

 private:
  Row row(int64_t i) const;
  int64_t document_at(int64_t token) const;  // empty documents hold none
  DocumentStore store_;
  int64_t sequence_length_;
  int64_t micro_batch_;
  bool predict_across_documents_;
  int rank_;
  int world_;
  int64_t all_rows_;  // in the store
  int64_t rows_;      // used, of all ranks
  int64_t batches_;
};

}  // namespace sbtrain
