#include "data/prepare.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "core/sha256.h"
#include "text/text_input.h"

namespace sbtrain {
namespace {

constexpr size_t kTaskBytes = 256 * 1024;  // so large that passing a task on costs little

// The most input that may have been read without its tokens being written, so that memory does not
// grow with the length of documents. A single line that is longer is processed by itself.
constexpr int64_t kWaitingBytes = int64_t{64} << 20;

// A document or a part of one, and for the first part of a text its key for the split.
struct Unencoded {
  RawDocument raw;
  double split_key = 0;
};

// Consecutive documents or parts of documents, in the order of the input.
struct EncodeTask {
  int64_t number = 0;
  int64_t bytes = 0;     // of the documents
  int64_t position = 0;  // in the input, after them
  int64_t forced_cuts = 0;
  std::vector<Unencoded> documents;
};

struct Encoded {
  struct Chunk {
    std::string source{};
    int64_t text_bytes = 0;
    size_t tokens = 0;
    double split_key = 0;  // of the first chunk
    bool first = true;     // of its document
    bool last = true;
  };
  int64_t bytes = 0;
  int64_t position = 0;
  int64_t forced_cuts = 0;
  int64_t bad_records = 0;             // left out
  std::vector<std::string> first_bad;  // of them
  std::vector<Chunk> chunks;
  std::vector<int32_t> tokens;  // of all documents in the task
};

// A number from 0 to 1 that depends on nothing but a document's content.
double split_key(std::string_view content) {
  constexpr size_t kKeyBytes = size_t{64} << 10;  // so that the parts of long texts need not wait
  content = content.substr(0, kKeyBytes);
  const Digest digest = sha256(content.data(), content.size());
  uint64_t key = 0;
  std::memcpy(&key, digest.data(), sizeof key);
  return static_cast<double>(key) * 0x1p-64;
}

// Reads documents. Plain text, which comes in parts, is cut where the tokenizer would cut it.
class DocumentReader {
 public:
  DocumentReader(TextInput& input, const Tokenizer* tokenizer)
      : input_(input), tokenizer_(tokenizer) {}

  bool next(Unencoded& document) {
    if (rest_.empty()) {
      if (!input_.next(read_)) return false;
      if (read_.kind != RawDocument::Kind::kText) {
        document = {.raw = std::move(read_)};
        return true;
      }
      take();
    }
    while (!read_.last && rest_.size() <= Tokenizer::kChunkBytes && input_.next(read_)) take();
    cut(document);
    return true;
  }

  // The number of cuts since the last call that may change tokens.
  int64_t forced_cuts() { return std::exchange(forced_cuts_, 0); }

 private:
  void take() {
    rest_ += read_.data;
    first_ = first_ || read_.first;
  }
  void cut(Unencoded& document) {
    const Tokenizer::Chunk chunk = tokenizer_->first_chunk(rest_);
    forced_cuts_ += chunk.exact ? 0 : 1;
    document = {.raw = {.kind = RawDocument::Kind::kText,
                        .data = rest_.substr(0, chunk.bytes),
                        .origin = read_.origin,
                        .first = first_,
                        .last = read_.last && chunk.bytes == rest_.size()},
                .split_key = first_ ? split_key(rest_) : 0};
    first_ = false;
    rest_.erase(0, chunk.bytes);
  }

  TextInput& input_;
  const Tokenizer* tokenizer_;  // null if no document is text
  RawDocument read_;
  std::string rest_;  // text of a document that is read but not returned yet
  bool first_ = false;
  int64_t forced_cuts_ = 0;
};

// Turns documents into the tokens that a store of this format holds.
class Encoder {
 public:
  Encoder(const Tokenizer* tokenizer, const StoreInfo& format, bool skip_bad_records)
      : tokenizer_(tokenizer), format_(format), skip_bad_records_(skip_bad_records) {}

  Encoded encode(EncodeTask task) const {
    Encoded result;
    result.bytes = task.bytes;
    result.position = task.position;
    result.forced_cuts = task.forced_cuts;
    for (Unencoded& document : task.documents) add(std::move(document), result);
    return result;
  }

 private:
  void add(Unencoded document, Encoded& result) const {
    RawDocument& raw = document.raw;
    Encoded::Chunk chunk{.split_key = document.split_key, .first = raw.first, .last = raw.last};
    const size_t before = result.tokens.size();
    if (format_.starts_with_bos && chunk.first) result.tokens.push_back(format_.bos);
    const size_t content = result.tokens.size();
    if (raw.kind == RawDocument::Kind::kTokens) {
      if (chunk.first) chunk.split_key = split_key(raw.data);
      add_tokens(raw, chunk, result);
    } else {
      const bool whole = raw.kind != RawDocument::Kind::kText;
      const std::optional<Document> parsed = parse(std::move(raw), result);
      if (!parsed) return result.tokens.resize(before);
      if (whole) chunk.split_key = split_key(parsed->text);
      chunk.source = parsed->source;
      add_text(parsed->text, chunk, result);
    }
    if (chunk.first && chunk.last && result.tokens.size() == content) {
      result.tokens.resize(before);  // a document without text
      return;
    }
    if (format_.ends_with_eos && chunk.last) result.tokens.push_back(format_.eos);
    chunk.tokens = result.tokens.size() - before;
    result.chunks.push_back(std::move(chunk));
  }

  // Nothing for a record that is left out.
  std::optional<Document> parse(RawDocument raw, Encoded& result) const {
    try {
      return parse_document(std::move(raw));
    } catch (const Error& error) {
      if (!skip_bad_records_ || error.code() != ExitCode::kData) throw;
      ++result.bad_records;
      if (result.first_bad.size() < kBadRecordsNamed) result.first_bad.emplace_back(error.what());
      return std::nullopt;
    }
  }

  void add_text(std::string_view text, Encoded::Chunk& chunk, Encoded& result) const {
    chunk.text_bytes = static_cast<int64_t>(text.size());
    for (bool continues = !chunk.first; !text.empty(); continues = true) {
      const Tokenizer::Chunk piece = tokenizer_->first_chunk(text);
      tokenizer_->encode(text.substr(0, piece.bytes), result.tokens, continues);
      text.remove_prefix(piece.bytes);
      result.forced_cuts += piece.exact ? 0 : 1;
    }
  }

  void add_tokens(const RawDocument& raw, Encoded::Chunk& chunk, Encoded& result) const {
    chunk.source = raw.origin->source;
    const auto width = static_cast<size_t>(raw.token_bytes);
    for (size_t at = 0; at < raw.data.size(); at += width) {
      uint32_t token = 0;
      std::memcpy(&token, raw.data.data() + at, width);
      if (token >= format_.vocab) {
        fail(ExitCode::kData, "{}: token {} is {}, beyond the vocabulary of {}{}", raw.origin->name,
             raw.position + static_cast<int64_t>(at / width), token, format_.vocab,
             tokenizer_ ? " of " + tokenizer_->path() : "");
      }
      result.tokens.push_back(static_cast<int32_t>(token));
      if (tokenizer_) chunk.text_bytes += tokenizer_->byte_length(static_cast<int32_t>(token));
    }
  }

  const Tokenizer* tokenizer_;
  const StoreInfo& format_;
  const bool skip_bad_records_;
};

// One thread reads, several encode, and the caller takes the results in the order of the input. At
// most a few tasks per thread are in progress, so memory does not grow with the input.
class EncodingPipeline {
 public:
  EncodingPipeline(TextInput& input, const Tokenizer* tokenizer, const StoreInfo& format,
                   const PrepareOptions& options)
      : input_(input),
        tokenizer_(tokenizer),
        encoder_(tokenizer, format, options.skip_bad_records) {
    const int threads = options.threads;
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const int encoders = std::max(1, threads > 0 ? threads : cores);
    limit_ = 4 * encoders;
    try {
      threads_.emplace_back([this] { guarded(&EncodingPipeline::read); });
      for (int i = 0; i < encoders; ++i) {
        threads_.emplace_back([this] { guarded(&EncodingPipeline::work); });
      }
    } catch (...) {
      // A limit on processes or memory was reached. Fewer encoding threads suffice, but without
      // any the caller would wait for ever.
      if (threads_.size() >= 2) return;
      stop();
      throw;
    }
  }

  ~EncodingPipeline() { stop(); }
  EncodingPipeline(const EncodingPipeline&) = delete;
  EncodingPipeline& operator=(const EncodingPipeline&) = delete;

  enum class Next { kResult, kNone, kEnd };
  // Waits for the next result, but not longer than 0.1 s, so that the caller can do other things
  // while a pipe is silent. Rethrows an exception of a thread.
  Next next(Encoded& result) {
    std::unique_lock lock(mutex_);
    const bool ready = changed_.wait_for(lock, std::chrono::milliseconds(100), [this] {
      return error_ || done_.contains(taken_) || taken_ == tasks_;
    });
    if (error_) std::rethrow_exception(error_);
    if (!ready) return Next::kNone;
    if (taken_ == tasks_) return Next::kEnd;
    result = std::move(done_.extract(taken_).mapped());
    ++taken_;
    waiting_bytes_ -= result.bytes;
    lock.unlock();
    changed_.notify_all();
    return Next::kResult;
  }

 private:
  void stop() {
    input_.stop();
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void guarded(void (EncodingPipeline::*body)()) {
    try {
      (this->*body)();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      stop_ = true;
      changed_.notify_all();
    }
  }

  void read() {
    DocumentReader reader(input_, tokenizer_);
    bool more = true;
    for (int64_t number = 0; more; ++number) {
      EncodeTask task{.number = number, .documents = {}};
      Unencoded document;
      // Documents without text take memory as well.
      size_t memory = 0;
      while (memory < kTaskBytes && (more = reader.next(document))) {
        task.bytes += static_cast<int64_t>(document.raw.data.size());
        memory += document.raw.data.size() + sizeof document;
        task.documents.push_back(std::move(document));
      }
      task.position = input_.position();
      task.forced_cuts = reader.forced_cuts();
      if (!hand_over(std::move(task), more)) return;
    }
  }

  // Waits for room; returns false if the pipeline stops. `more`: this is not the last task.
  bool hand_over(EncodeTask task, bool more) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      const bool few = task.number - taken_ < limit_;
      const bool small = waiting_bytes_ == 0 || waiting_bytes_ + task.bytes <= kWaitingBytes;
      return stop_ || (few && small);
    });
    if (stop_) return false;
    if (!more) tasks_ = task.number + (task.documents.empty() ? 0 : 1);
    if (!task.documents.empty()) {
      waiting_bytes_ += task.bytes;
      waiting_.push_back(std::move(task));
    }
    lock.unlock();
    changed_.notify_all();
    return true;
  }

  void work() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || !waiting_.empty() || tasks_ >= 0; });
      if (stop_ || waiting_.empty()) return;
      EncodeTask task = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      const int64_t number = task.number;
      Encoded result = encoder_.encode(std::move(task));
      lock.lock();
      done_.emplace(number, std::move(result));
      lock.unlock();
      changed_.notify_all();
    }
  }

  TextInput& input_;
  const Tokenizer* tokenizer_;
  const Encoder encoder_;
  int64_t limit_ = 0;  // tasks read and not taken yet

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<EncodeTask> waiting_;
  std::map<int64_t, Encoded> done_;
  int64_t taken_ = 0;
  int64_t waiting_bytes_ = 0;  // of tasks read and not taken yet
  int64_t tasks_ = -1;         // in all, once it is known
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

// Totals by source, in the order of the sources' first documents.
class SourceTotals {
 public:
  void add(const Encoded::Chunk& chunk) {
    const auto [entry, is_new] = index_.try_emplace(chunk.source, totals_.size());
    if (is_new) totals_.push_back({.name = chunk.source});
    StoreSource& total = totals_[entry->second];
    total.documents += chunk.last ? 1 : 0;
    total.tokens += static_cast<int64_t>(chunk.tokens);
    total.text_bytes += chunk.text_bytes;
    text_bytes_ += chunk.text_bytes;
  }
  const std::vector<StoreSource>& totals() const { return totals_; }
  int64_t text_bytes() const { return text_bytes_; }

 private:
  std::map<std::string, size_t> index_;
  std::vector<StoreSource> totals_;
  int64_t text_bytes_ = 0;
};

// What a store of token files holds when no tokenizer says it.
StoreInfo format_of_tokens(const PrepareOptions& options, const TextInput& input) {
  StoreInfo info;
  info.vocab = options.vocab;
  int64_t end_of_text = options.input.end_of_text;
  const LlmCModel* model = input.files().front().model;
  for (const TextFile& file : input.files()) {
    if (!holds_tokens(file.format)) {
      fail(ExitCode::kUsage, "{}: this is text, which needs a --tokenizer", file.origin.name);
    }
    if (file.model != model) {
      fail(ExitCode::kUsage, "{} and {} are tokens of different vocabularies",
           input.files().front().origin.name, file.origin.name);
    }
  }
  if (model) {
    if (info.vocab == 0) info.vocab = model->vocab;
    if (end_of_text < 0) end_of_text = model->end_of_text;
  }
  if (info.vocab == 0) {
    fail(ExitCode::kUsage,
         "files of nanoGPT do not say their vocabulary: give --tokenizer or --vocab");
  }
  if (end_of_text >= info.vocab) {
    fail(ExitCode::kUsage, "--eot {} lies beyond the vocabulary of {}", end_of_text, info.vocab);
  }
  if (options.bos && end_of_text < 0) {
    fail(ExitCode::kUsage, "--bos needs --eot or --tokenizer, which say what bos is");
  }
  info.bos = info.eos = static_cast<int32_t>(end_of_text);
  info.starts_with_bos = options.bos;
  info.ends_with_eos = options.eos && end_of_text >= 0;
  return info;
}

StoreInfo store_format(const PrepareOptions& options, const Tokenizer* tokenizer,
                       const TextInput& input) {
  if (!tokenizer) return format_of_tokens(options, input);
  if (options.vocab > 0) {
    fail(ExitCode::kUsage, "--vocab is for tokens without a tokenizer; leave out one of the two");
  }
  if ((options.bos && tokenizer->bos() < 0) || (options.eos && tokenizer->eos() < 0)) {
    fail(ExitCode::kUsage, "{}: the tokenizer has no {} token", tokenizer->path(),
         options.bos && tokenizer->bos() < 0 ? "bos" : "eos");
  }
  StoreInfo info;
  info.vocab = tokenizer->size();
  info.tokenizer_hash = tokenizer->hash();
  info.bos = tokenizer->bos();
  info.eos = tokenizer->eos();
  info.starts_with_bos = options.bos;
  info.ends_with_eos = options.eos;
  return info;
}

// nanoGPT's files do not say which token ends a document. With a tokenizer it is the tokenizer's.
InputOptions input_options(const PrepareOptions& options, const Tokenizer* tokenizer) {
  InputOptions input = options.input;
  if (input.format == InputFormat::kNanoGpt && input.end_of_text < 0 && tokenizer) {
    input.end_of_text = tokenizer->eos();
  }
  return input;
}

// One of the files that are written.
class Output {
 public:
  Output(const std::string& path, const StoreInfo& format) : path_(path), writer_(path, format) {}

  void append(const Encoded::Chunk& chunk, std::span<const int32_t> tokens) {
    writer_.append(tokens, chunk.last);
    totals_.add(chunk);
    tokens_ += static_cast<int64_t>(tokens.size());
  }
  StoreInfo complete() { return writer_.complete(totals_.totals(), totals_.text_bytes()); }
  void commit() { writer_.commit(); }

  int64_t tokens() const { return tokens_; }
  // Removes the file that commit() would replace.
  void remove_old() const {
    std::error_code missing;
    const std::filesystem::path old = std::filesystem::canonical(path_, missing);
    if (!missing && !std::filesystem::remove(old, missing)) {
      fail(ExitCode::kStorage, "{}: cannot remove the old file: {}", path_, missing.message());
    }
  }

 private:
  std::string path_;
  DocumentWriter writer_;
  SourceTotals totals_;
  int64_t tokens_ = 0;
};

// The store, and with a split the one for validation, of the documents that are long enough.
class Outputs {
 public:
  Outputs(const PrepareOptions& options, const StoreInfo& format)
      : split_(options.split), min_tokens_(options.min_tokens), train_(options.output, format) {
    if (split_ > 0) validation_.emplace(validation_path(options.output), format);
  }

  void append(const Encoded::Chunk& chunk, std::span<const int32_t> tokens,
              PrepareProgress& progress) {
    if (chunk.first) {
      to_validation_ = chunk.split_key < split_;
      document_tokens_ = 0;
    }
    const bool waited = document_tokens_ < min_tokens_;
    document_tokens_ += static_cast<int64_t>(tokens.size());
    if (document_tokens_ < min_tokens_) {
      wait(chunk, tokens, progress);
      return;
    }
    if (waited) {
      std::span<const int32_t> rest(waiting_tokens_);
      for (const Encoded::Chunk& earlier : std::exchange(waiting_, {})) {
        write(earlier, rest.first(earlier.tokens), progress);
        rest = rest.subspan(earlier.tokens);
      }
      waiting_tokens_.clear();
    }
    write(chunk, tokens, progress);
  }
  // Of those that were too short.
  int64_t longest_left_out() const { return longest_left_out_; }

  PreparedStores finish(int64_t documents) {
    if (!validation_) {
      PreparedStores stores{.store = train_.complete(), .validation = {}};
      train_.commit();
      return stores;
    }
    if (train_.tokens() == 0 || validation_->tokens() == 0) {
      fail(ExitCode::kUsage, "a split of {} leaves no {} among {} documents; choose a {} one",
           split_, train_.tokens() == 0 ? "training data" : "validation data", documents,
           train_.tokens() == 0 ? "smaller" : "larger");
    }
    PreparedStores stores{.store = train_.complete(), .validation = validation_->complete()};
    train_.remove_old();
    validation_->commit();
    train_.commit();
    return stores;
  }

 private:
  void write(const Encoded::Chunk& chunk, std::span<const int32_t> tokens,
             PrepareProgress& progress) {
    (to_validation_ ? *validation_ : train_).append(chunk, tokens);
    progress.documents += chunk.last ? 1 : 0;
    progress.tokens += static_cast<int64_t>(tokens.size());
  }
  void wait(const Encoded::Chunk& chunk, std::span<const int32_t> tokens,
            PrepareProgress& progress) {
    if (!chunk.last) {
      waiting_.push_back(chunk);
      waiting_tokens_.insert(waiting_tokens_.end(), tokens.begin(), tokens.end());
      return;
    }
    ++progress.too_short;
    longest_left_out_ = std::max(longest_left_out_, document_tokens_);
    waiting_.clear();
    waiting_tokens_.clear();
  }

  const double split_;
  const int64_t min_tokens_;
  Output train_;
  std::optional<Output> validation_;
  bool to_validation_ = false;  // where the current document goes
  int64_t document_tokens_ = 0;
  std::vector<Encoded::Chunk> waiting_;  // of the current document, which is too short so far
  std::vector<int32_t> waiting_tokens_;
  int64_t longest_left_out_ = 0;
};

void add_bad_records(const Encoded& encoded, PrepareProgress& progress) {
  progress.bad_records += encoded.bad_records;
  for (const std::string& record : encoded.first_bad) {
    if (progress.first_bad.size() < kBadRecordsNamed) progress.first_bad.push_back(record);
  }
}

}  // namespace

std::string validation_path(const std::string& output) {
  const std::filesystem::path path(output);
  const std::string name = path.stem().string() + ".validation" + path.extension().string();
  return (path.parent_path() / name).string();
}

PreparedStores prepare_documents(const PrepareOptions& options, const Tokenizer* tokenizer,
                                 const PrepareReport& report) {
  TextInput input(options.inputs, input_options(options, tokenizer));
  check_output(options.output, input.paths());
  if (options.split > 0) check_output(validation_path(options.output), input.paths());
  const StoreInfo format = store_format(options, tokenizer, input);
  PrepareProgress progress;
  progress.total_bytes = input.total_bytes();
  progress.taken = input.taken();
  progress.left_out = input.left_out();
  const auto tell = [&] {
    if (report && !report(progress)) throw Interrupted{};
  };
  tell();
  Outputs outputs(options, format);
  EncodingPipeline pipeline(input, tokenizer, format, options);
  using Next = EncodingPipeline::Next;
  Encoded encoded;
  for (Next next = pipeline.next(encoded); next != Next::kEnd; next = pipeline.next(encoded)) {
    if (next == Next::kResult) {
      std::span<const int32_t> rest(encoded.tokens);
      for (const Encoded::Chunk& chunk : encoded.chunks) {
        outputs.append(chunk, rest.first(chunk.tokens), progress);
        rest = rest.subspan(chunk.tokens);
      }
      progress.bytes = encoded.position;
      progress.content_bytes += encoded.bytes;
      progress.forced_cuts += encoded.forced_cuts;
      add_bad_records(encoded, progress);
    }
    tell();
  }
  if (progress.tokens == 0 && progress.bad_records > 0) {
    fail(ExitCode::kData, "{}: there is no text in the input; {} record(s) are bad, such as {}",
         input.name(), progress.bad_records, progress.first_bad.front());
  }
  if (progress.too_short > 0 && progress.tokens == 0) {
    fail(ExitCode::kUsage, "{}: no document has {} tokens (--min-tokens); the longest of {} has {}",
         input.name(), options.min_tokens, progress.too_short, outputs.longest_left_out());
  }
  if (progress.tokens == 0)
    fail(ExitCode::kUsage, "{}: there is no text in the input", input.name());
  progress.done = true;
  tell();
  return outputs.finish(progress.documents);
}

}  // namespace sbtrain
