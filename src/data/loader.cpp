#include "data/loader.h"

#include <algorithm>
#include <set>
#include <utility>

#include "core/error.h"

namespace sbtrain {
namespace {

// Collects fields whose values differ between a saved state and the present run.
class Differences {
 public:
  explicit Differences(const std::vector<std::string>& accepted) : accepted_(accepted) {}

  template <typename T>
  void compare(const std::string& field, const T& saved, const T& now) {
    if (saved == now) return;
    if (std::find(accepted_.begin(), accepted_.end(), field) != accepted_.end()) return;
    text_ += fmt::format("\n  {}: {} in the checkpoint, {} now", field, saved, now);
  }

  void throw_if_any() const {
    if (text_.empty()) return;
    fail(ExitCode::kConfig,
         "the data differs from what the checkpoint was trained on:{}\nRestore these settings, or "
         "accept each change by its name: --checkpoint.allow_changes='[name, ...]'",
         text_);
  }

 private:
  const std::vector<std::string>& accepted_;
  std::string text_;
};

}  // namespace

std::string common_tokenizer(const std::vector<SourceConfig>& sources) {
  std::string hash;
  std::string first;
  std::set<std::string> seen;
  for (const SourceConfig& source : sources) {
    if (!seen.insert(source.path).second) continue;
    const DocumentStore store(source.path);
    if (hash.empty()) {
      hash = store.info().tokenizer_hash;
      first = source.path;
    } else if (store.info().tokenizer_hash != hash) {
      fail(ExitCode::kConfig, "{} and {} were prepared with different tokenizers", first,
           source.path);
    }
  }
  return hash;
}

Loader::Loader(LoaderOptions options, const LoaderState* state) : options_(std::move(options)) {
  check_options();
  open_sources();
  base_ = fresh_state();
  if (state != nullptr) restore(*state);
  start_packers();
  producer_ = std::thread([this] { produce(); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (producer_.joinable()) producer_.join();
}

void Loader::check_options() const {
  const LoaderOptions& o = options_;
  if (o.sources.empty() && !o.task.active())
    fail(ExitCode::kConfig, "data.sources: no training data is given");
  if (o.sequence_length < 1 || o.micro_batch < 1 || o.batch < 1 || o.prefetch < 1) {
    fail(ExitCode::kConfig,
         "train.sequence_length ({}), train.micro_batch ({}), train.batch ({}) and data.prefetch "
         "({}) must be positive",
         o.sequence_length, o.micro_batch, o.batch, o.prefetch);
  }
  if (o.sequence_length > INT32_MAX / o.micro_batch) {
    fail(ExitCode::kConfig, "{} sequences of {} tokens: a micro-batch holds at most 2^31 tokens",
         o.micro_batch, o.sequence_length);
  }
  require(o.world > 0 && o.rank >= 0 && o.rank < o.world, "rank {} of {}", o.rank, o.world);
  if (o.batch % (o.world * o.micro_batch) != 0) {
    fail(ExitCode::kConfig,
         "train.batch: {} sequences cannot be shared by {} rank(s) in micro-batches of {}; it must "
         "be a multiple of {}",
         o.batch, o.world, o.micro_batch, o.world * o.micro_batch);
  }
}

void Loader::open_sources() {
  if (options_.task.active()) {
    task_ = std::make_unique<Task>(options_.task, options_.task_vocab, options_.sequence_length,
                                   options_.seed);
    return;
  }
  std::set<std::string> hashes;
  for (const SourceConfig& source : options_.sources) {
    auto store = std::make_unique<DocumentStore>(source.path);
    const StoreInfo& info = store->info();
    if (info.tokens * info.token_bytes() <= kEagerBytes) store->verify();
    if (!hashes.insert(info.content_hash).second) {
      fail(ExitCode::kConfig,
           "data.sources: {} has the same content as another source; give it "
           "once, with the sum of the weights",
           source.path);
    }
    if (!stores_.empty() && (info.tokenizer_hash != tokenizer_hash() || info.vocab != vocab())) {
      fail(ExitCode::kConfig, "data.sources: {} and {} were made with different tokenizers",
           stores_.front()->path(), source.path);
    }
    stores_.push_back(std::move(store));
  }
}

LoaderState Loader::fresh_state() const {
  LoaderState state;
  state.seed = options_.seed;
  state.packing = name_of(options_.packing);
  state.predict_across_documents = options_.predict_across_documents;
  state.sequence_length = options_.sequence_length;
  state.batch = options_.batch;
  state.stage = options_.stage;
  state.micro_batch = options_.micro_batch;
  state.world = options_.world;
  if (task_) state.sources.push_back(task_source());
  if (!stores_.empty()) state.tokenizer_hash = tokenizer_hash();
  state.starts_with_bos =
      !stores_.empty() && std::all_of(stores_.begin(), stores_.end(),
                                      [](const auto& s) { return s->info().starts_with_bos; });
  for (size_t i = 0; i < stores_.size(); ++i) {
    const StoreInfo& info = stores_[i]->info();
    state.sources.push_back({.path = stores_[i]->path(),
                             .content_hash = info.content_hash,
                             .documents = info.documents,
                             .tokens = info.tokens,
                             .weight = options_.sources[i].weight,
                             .active = true,
                             .cursor = {},
                             .taken = 0});
  }
  return state;
}

// A task is a source whose documents are its examples.
LoaderState::Source Loader::task_source() const {
  return {.path = std::string(name_of(options_.task.type)),
          .content_hash = task_->fingerprint(),
          .documents = options_.task.examples,
          .tokens = options_.task.examples * options_.sequence_length,
          .weight = 1,
          .active = true,
          .cursor = {},
          .taken = 0};
}

void Loader::check_same_data(const LoaderState& state) const {
  Differences differences(options_.accept_changes);
  differences.compare("seed", state.seed, base_.seed);
  differences.compare("data.packing", state.packing, base_.packing);
  differences.compare("data.predict_across_documents", state.predict_across_documents,
                      base_.predict_across_documents);
  differences.compare("train.sequence_length", state.sequence_length, base_.sequence_length);
  differences.compare("train.batch", state.batch, base_.batch);
  if (!state.tokenizer_hash.empty()) {
    differences.compare("tokenizer_hash", state.tokenizer_hash, base_.tokenizer_hash);
  }
  if (state.stage == base_.stage) {
    std::vector<LoaderState::Source> saved;
    std::copy_if(state.sources.begin(), state.sources.end(), std::back_inserter(saved),
                 [](const LoaderState::Source& source) { return source.active; });
    differences.compare("data.sources", saved.size(), base_.sources.size());
    for (size_t i = 0; i < std::min(saved.size(), base_.sources.size()); ++i) {
      const LoaderState::Source& now = base_.sources[i];
      const std::string name = fmt::format("data.sources.{}.", i);
      differences.compare(name + "content_hash", saved[i].content_hash, now.content_hash);
      differences.compare(name + "documents", saved[i].documents, now.documents);
      differences.compare(name + "tokens", saved[i].tokens, now.tokens);
      differences.compare(name + "weight", saved[i].weight, now.weight);
    }
  }
  differences.throw_if_any();
}

void Loader::restore(const LoaderState& state) {
  if (state.stage > base_.stage) {
    fail(ExitCode::kConfig, "the data state belongs to stage {}, but the run is in stage {}",
         state.stage, base_.stage);
  }
  check_same_data(state);
  if (state.micro != 0 && (state.world != base_.world || state.micro_batch != base_.micro_batch ||
                           state.batch != base_.batch || state.stage != base_.stage)) {
    fail(ExitCode::kConfig,
         "the data state lies inside an optimizer step; it can only be continued with the same "
         "world size ({}), micro-batch ({}), batch and stage",
         state.world, state.micro_batch);
  }
  base_.step = state.step;
  base_.micro = state.micro;
  const bool same_rows =
      state.sequence_length == base_.sequence_length && state.packing == base_.packing;
  for (const LoaderState::Source& saved : state.sources) {
    const auto now = std::find_if(
        base_.sources.begin(), base_.sources.end(),
        [&](const LoaderState::Source& s) { return s.content_hash == saved.content_hash; });
    if (now == base_.sources.end()) {
      base_.sources.push_back(saved);  // a later stage may use it again
      base_.sources.back().active = false;
      continue;
    }
    now->cursor = saved.cursor;
    // Another row length or packing gives other rows, so the source continues with its next epoch.
    if (!same_rows) now->cursor = {saved.cursor.epoch + 1, 0, 0};
    if (state.stage == base_.stage && saved.active) now->taken = saved.taken;
  }
}

std::unique_ptr<Packer> Loader::packer(size_t source) const {
  const SourceCursor& cursor = base_.sources[source].cursor;
  if (task_) return make_task_packer(*task_, cursor);
  return make_packer(options_.packing,
                     {.offsets = stores_[source]->offsets(),
                      .content_hash = base_.sources[source].content_hash,
                      .seed = options_.seed,
                      .row_tokens = options_.sequence_length},
                     cursor);
}

void Loader::start_packers() {
  std::vector<double> weights;
  const size_t active = task_ ? 1 : stores_.size();
  for (size_t i = 0; i < active; ++i) {
    const LoaderState::Source& source = base_.sources[i];
    weights.push_back(source.weight);
    consumed_.cursors.push_back(source.cursor);
    consumed_.taken.push_back(source.taken);
    packers_.push_back(packer(i));
  }
  consumed_.step = base_.step;
  consumed_.micro = base_.micro;
  mixture_ = std::make_unique<Mixture>(weights, consumed_.taken);
}

int64_t Loader::micro_batches_per_step() const {
  return options_.batch / (options_.world * options_.micro_batch);
}

LoaderState Loader::state() const {
  LoaderState state = base_;
  state.step = consumed_.step;
  state.micro = consumed_.micro;
  for (size_t i = 0; i < consumed_.cursors.size(); ++i) {
    state.sources[i].cursor = consumed_.cursors[i];
    state.sources[i].taken = consumed_.taken[i];
  }
  return state;
}

PackedBatch Loader::next() {
  std::unique_lock lock(mutex_);
  if (ready_.empty() && !error_) ++waits_;
  changed_.wait(lock, [this] { return !ready_.empty() || error_; });
  if (ready_.empty()) std::rethrow_exception(error_);
  Item item = std::move(ready_.front());
  ready_.pop_front();
  lock.unlock();
  changed_.notify_all();
  consumed_ = std::move(item.after);
  return std::move(item.batch);
}

// ---- The producer's thread -----------------------------------------------------------------

std::vector<Row> Loader::plan_step() {
  std::vector<Row> rows;
  rows.reserve(static_cast<size_t>(options_.batch));
  for (int64_t i = 0; i < options_.batch; ++i) {
    const int source = mixture_->pick(options_.sequence_length);
    rows.push_back(packers_[static_cast<size_t>(source)]->next());
    rows.back().source = source;
    mixture_->add(source, rows.back().tokens());
  }
  return rows;
}

Loader::Progress Loader::progress(int64_t step, int64_t micro) const {
  Progress progress{.step = step, .micro = micro, .cursors = {}, .taken = mixture_->taken()};
  for (const auto& packer : packers_) progress.cursors.push_back(packer->cursor());
  return progress;
}

PackedBatch Loader::read_batch(const std::vector<Row>& rows, int64_t first) const {
  PackedBatch batch;
  clear(batch, options_.micro_batch * options_.sequence_length);
  for (int64_t i = first; i < first + options_.micro_batch; ++i) {
    const Row& row = rows[static_cast<size_t>(i)];
    if (task_) {
      task_->append_example(batch, Task::Split::kTraining, row.pieces.front().document);
      continue;
    }
    append_row(batch, row, *stores_[static_cast<size_t>(row.source)],
               options_.predict_across_documents);
  }
  return batch;
}

void Loader::produce() {
  try {
    const int64_t per_step = micro_batches_per_step();
    const int64_t first_row = options_.rank * (options_.batch / options_.world);
    int64_t micro = base_.micro;
    for (int64_t step = base_.step;; ++step, micro = 0) {
      Progress at_start = progress(step, 0);
      const std::vector<Row> rows = plan_step();
      for (; micro < per_step; ++micro) {
        Item item;
        item.batch = read_batch(rows, first_row + micro * options_.micro_batch);
        const bool last = micro + 1 == per_step;
        item.after = last ? progress(step + 1, 0) : at_start;
        if (!last) item.after.micro = micro + 1;
        if (!push(std::move(item))) return;
      }
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    error_ = std::current_exception();
    changed_.notify_all();
  }
}

// Returns false if the loader is being destroyed.
bool Loader::push(Item item) {
  std::unique_lock lock(mutex_);
  changed_.wait(
      lock, [this] { return stop_ || static_cast<int64_t>(ready_.size()) < options_.prefetch; });
  if (stop_) return false;
  ready_.push_back(std::move(item));
  lock.unlock();
  changed_.notify_all();
  return true;
}

// ---- Validation ----------------------------------------------------------------------------

ValidationReader::ValidationReader(const std::string& path, int64_t sequence_length,
                                   int64_t micro_batch, int64_t max_tokens,
                                   bool predict_across_documents, int rank, int world)
    : store_(path),
      sequence_length_(sequence_length),
      micro_batch_(micro_batch),
      predict_across_documents_(predict_across_documents),
      rank_(rank),
      world_(world) {
  require(sequence_length > 0 && micro_batch > 0 && max_tokens > 0, "validation of {} x {} tokens",
          micro_batch, sequence_length);
  if (store_.info().tokens * store_.info().token_bytes() <= Loader::kEagerBytes) store_.verify();
  all_rows_ = (store_.tokens() + sequence_length - 1) / sequence_length;
  const int64_t whole_rows = std::max<int64_t>(1, max_tokens / sequence_length);
  rows_ = max_tokens < store_.tokens() ? std::min(whole_rows, all_rows_) : all_rows_;
  const int64_t in_all = (rows_ + micro_batch - 1) / micro_batch;
  batches_ = (in_all + world - 1) / world;
}

int64_t ValidationReader::document_at(int64_t token) const {
  const auto offsets = store_.offsets();
  const auto behind =
      std::upper_bound(offsets.begin(), offsets.end(), static_cast<uint64_t>(token));
  return behind - offsets.begin() - 1;
}

Row ValidationReader::row(int64_t i) const {
  // Row i of the `rows_` rows that are spread over all rows of the store.
  const int64_t index = i * all_rows_ / rows_;
  const int64_t begin = index * sequence_length_;
  const int64_t end = std::min(begin + sequence_length_, store_.tokens());
  const auto offsets = store_.offsets();
  const auto start_of = [&](int64_t document) {
    return static_cast<int64_t>(offsets[static_cast<size_t>(document)]);
  };
  Row row;
  for (int64_t at = begin; at < end;) {
    const int64_t document = document_at(at);
    const int64_t length = std::min(end, start_of(document + 1)) - at;
    row.pieces.push_back({document, at - start_of(document), length});
    at += length;
  }
  if (end < begin + sequence_length_) {
    row.pieces.push_back({-1, 0, begin + sequence_length_ - end});
  } else if (end < store_.tokens() && start_of(document_at(end)) == end) {
    row.next_document = document_at(end);
  }
  return row;
}

PackedBatch ValidationReader::batch(int64_t i) const {
  require(i >= 0 && i < batches_, "validation batch {} of {}", i, batches_);
  PackedBatch batch;
  clear(batch, micro_batch_ * sequence_length_);
  const int64_t first = (i * world_ + rank_) * micro_batch_;
  for (int64_t k = first; k < first + micro_batch_; ++k) {
    if (k < rows_) {
      append_row(batch, row(k), store_, predict_across_documents_);
    } else {
      append_padding(batch, sequence_length_);
    }
  }
  return batch;
}

}  // namespace sbtrain
