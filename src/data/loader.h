// Micro-batches for one rank, prepared ahead of training by a thread of their own.
//
// The order of rows is one for the whole run: each optimizer step takes the next `batch` rows, and
// rank r of w takes rows [r batch/w, (r+1) batch/w) of them. Every rank walks the whole order,
// which costs no reading, so all that changes with the world size is who reads a row.
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

#include "config/config.h"
#include "data/batch.h"
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
  int64_t stage = 0;     // index; a higher one than the state's takes the new mixture over
  int64_t prefetch = 4;  // micro-batches prepared ahead
  // Fields that may differ from the state's, by the names that the error gives them: "seed",
  // "batch", "data.sources[0].content_hash", ...
  std::vector<std::string> accept_changes;
};

// Where the order stands: what a checkpoint keeps of the data. Counters and fingerprints only; it
// fits any world size whenever `micro` is 0, that is between optimizer steps.
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
  int64_t micro_batch = 0;  // micro-batch and world that `micro` counts in
  int64_t world = 0;
  // What the text was prepared with, the same for all sources; empty for tasks and where the state
  // is of a version that did not know.
  std::string tokenizer_hash;
  bool starts_with_bos = false;  // documents of every source do
  std::vector<Source> sources;
  bool operator==(const LoaderState&) const = default;

  std::string to_json() const;
  // Throws ExitCode::kData naming the key.
  static LoaderState from_json(std::string_view json);
};

// The tokenizer's hash that all sources were prepared with; empty without sources. Opens each
// store. Throws ExitCode::kConfig where they differ, ExitCode::kData for a store that is missing or
// damaged.
std::string common_tokenizer(const std::vector<SourceConfig>& sources);

class Loader {
 public:
  // Opens and checks the sources and starts to prepare batches. Sources of up to kEagerBytes are
  // verified whole before anything is used, larger ones block by block when first read.
  // With a state it goes on exactly where that state was taken. Throws
  //   ExitCode::kConfig  a task that does not fit its sequences, batch not divisible by world *
  //   micro_batch, sources of different
  //                      tokenizers, a state of other data or settings (all fields are named)
  //   ExitCode::kData    a source that is missing, unfinished or damaged (the file is named)
  explicit Loader(LoaderOptions options, const LoaderState* state = nullptr);
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next micro-batch of micro_batch * sequence_length tokens; waits for it if need be.
  // Rethrows what went wrong while it was prepared. One thread at a time.
  PackedBatch next();

  // After the micro-batch that next() returned last, whatever has been prepared ahead.
  LoaderState state() const;

  int64_t micro_batches_per_step() const;  // on this rank
  int64_t vocab() const { return task_ ? options_.task_vocab : stores_.front()->info().vocab; }
  const std::string& tokenizer_hash() const { return stores_.front()->info().tokenizer_hash; }
  // Calls of next() that found nothing ready; the first is always one.
  int64_t waits() const { return waits_; }

  static constexpr int64_t kEagerBytes = int64_t{2} << 30;

 private:
  // The part of the state that changes, of active sources only.
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
  std::unique_ptr<Task> task_;  // with it there are no stores
  LoaderState base_;            // settings, fingerprints and sources that are not active
  Progress consumed_;           // behind what next() returned last

  // The producer's own.
  std::vector<std::unique_ptr<Packer>> packers_;
  std::unique_ptr<Mixture> mixture_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Item> ready_;
  std::exception_ptr error_;
  bool stop_ = false;
  int64_t waits_ = 0;  // consumer only
  std::thread producer_;
};

// Held-out text in batches: rows of L tokens, evenly spread over the store, the same every time.
class ValidationReader {
 public:
  // At most `max_tokens` tokens, but at least one row if the store has any. Each rank gets its own
  // part and the same number of batches; the last may be padding alone. The store is verified.
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
  DocumentStore store_;
  int64_t sequence_length_;
  int64_t micro_batch_;
  bool predict_across_documents_;
  int rank_;
  int world_;
  int64_t all_rows_;  // in the store
  int64_t rows_;      // that are used
  int64_t batches_;
};

}  // namespace sbtrain
