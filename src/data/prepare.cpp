#include "data/prepare.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "data/text_input.h"

namespace sbtrain {
namespace {

constexpr int64_t kTaskBytes = 256 * 1024;  // so large that passing a task on costs little

// The most input that may have been read without its tokens being written, so that memory does not
// grow with the length of documents. A single line that is longer is processed by itself.
constexpr int64_t kWaitingBytes = int64_t{64} << 20;

// Consecutive documents or parts of documents, in the order of the input.
struct Task {
  int64_t number = 0;
  int64_t bytes = 0;  // of the input
  int64_t forced_cuts = 0;
  std::vector<RawDocument> documents;
};

struct Encoded {
  struct Part {
    std::string source;
    int64_t text_bytes = 0;
    size_t tokens = 0;
    bool last = true;  // of its document
  };
  int64_t bytes = 0;
  int64_t forced_cuts = 0;
  std::vector<Part> documents;
  std::vector<int32_t> tokens;  // of all documents in the task
};

// Reads documents; those that come in parts are cut where the tokenizer would cut them.
class DocumentReader {
 public:
  DocumentReader(TextInput& input, const Tokenizer& tokenizer)
      : input_(input), tokenizer_(tokenizer) {}

  bool next(RawDocument& document) {
    if (rest_.empty()) {
      if (!input_.next(read_)) return false;
      if (read_.line > 0) {
        document = std::move(read_);
        return true;
      }
      take();
    }
    while (!read_.last && rest_.size() <= Tokenizer::kPartBytes && input_.next(read_)) take();
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
  void cut(RawDocument& document) {
    const Tokenizer::Part part = tokenizer_.part(rest_);
    forced_cuts_ += part.exact ? 0 : 1;
    document = {.data = rest_.substr(0, part.bytes),
                .file = read_.file,
                .line = 0,
                .first = std::exchange(first_, false),
                .last = read_.last && part.bytes == rest_.size()};
    rest_.erase(0, part.bytes);
  }

  TextInput& input_;
  const Tokenizer& tokenizer_;
  RawDocument read_;
  std::string rest_;  // text of a document that is read but not returned yet
  bool first_ = false;
  int64_t forced_cuts_ = 0;
};

// Appends the tokens of a document or of a part of one.
void encode_document(RawDocument raw, const Tokenizer& tokenizer, const PrepareOptions& options,
                     Encoded& result) {
  const bool first = raw.first;
  const bool last = raw.last;
  Document document = parse_document(std::move(raw));
  if (document.text.empty() && first && last) return;
  const size_t before = result.tokens.size();
  if (options.bos && first) result.tokens.push_back(tokenizer.bos());
  bool continues = !first;
  for (std::string_view rest = document.text; !rest.empty(); continues = true) {
    const Tokenizer::Part part = tokenizer.part(rest);
    tokenizer.encode(rest.substr(0, part.bytes), result.tokens, continues);
    rest.remove_prefix(part.bytes);
    result.forced_cuts += part.exact ? 0 : 1;
  }
  if (options.eos && last) result.tokens.push_back(tokenizer.eos());
  result.documents.push_back({.source = std::move(document.source),
                              .text_bytes = static_cast<int64_t>(document.text.size()),
                              .tokens = result.tokens.size() - before,
                              .last = last});
}

Encoded encode(Task task, const Tokenizer& tokenizer, const PrepareOptions& options) {
  Encoded result;
  result.bytes = task.bytes;
  result.forced_cuts = task.forced_cuts;
  for (RawDocument& raw : task.documents) {
    encode_document(std::move(raw), tokenizer, options, result);
  }
  return result;
}

// One thread reads, several encode, and the caller takes the results in the order of the input. At
// most a few tasks per thread are in progress, so memory does not grow with the input.
class EncodingPipeline {
 public:
  EncodingPipeline(TextInput& input, const Tokenizer& tokenizer, const PrepareOptions& options)
      : input_(input), tokenizer_(tokenizer), options_(options) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const int encoders = std::max(1, options.threads > 0 ? options.threads : cores);
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

  // Returns false at the end of the input. Rethrows an exception of a thread.
  bool next(Encoded& result) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return error_ || done_.contains(taken_) || taken_ == tasks_; });
    if (error_) std::rethrow_exception(error_);
    if (taken_ == tasks_) return false;
    result = std::move(done_.extract(taken_).mapped());
    ++taken_;
    waiting_bytes_ -= result.bytes;
    lock.unlock();
    changed_.notify_all();
    return true;
  }

 private:
  void stop() {
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
      Task task{.number = number, .bytes = 0, .forced_cuts = 0, .documents = {}};
      RawDocument document;
      while (task.bytes < kTaskBytes && (more = reader.next(document))) {
        task.bytes += static_cast<int64_t>(document.data.size()) + (document.line > 0 ? 1 : 0);
        task.documents.push_back(std::move(document));
      }
      task.forced_cuts = reader.forced_cuts();
      if (!hand_over(std::move(task), more)) return;
    }
  }

  // Waits for room; returns false if the pipeline stops. `more`: this is not the last task.
  bool hand_over(Task task, bool more) {
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
      Task task = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      const int64_t number = task.number;
      Encoded result = encode(std::move(task), tokenizer_, options_);
      lock.lock();
      done_.emplace(number, std::move(result));
      lock.unlock();
      changed_.notify_all();
    }
  }

  TextInput& input_;
  const Tokenizer& tokenizer_;
  const PrepareOptions& options_;
  int64_t limit_ = 0;  // tasks read and not taken yet

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Task> waiting_;
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
  void add(const Encoded::Part& document) {
    const auto [entry, is_new] = index_.try_emplace(document.source, totals_.size());
    if (is_new) totals_.push_back({.name = document.source});
    StoreSource& total = totals_[entry->second];
    total.documents += document.last ? 1 : 0;
    total.tokens += static_cast<int64_t>(document.tokens);
    total.text_bytes += document.text_bytes;
    text_bytes_ += document.text_bytes;
  }
  const std::vector<StoreSource>& totals() const { return totals_; }
  int64_t text_bytes() const { return text_bytes_; }

 private:
  std::map<std::string, size_t> index_;
  std::vector<StoreSource> totals_;
  int64_t text_bytes_ = 0;
};

StoreInfo store_format(const PrepareOptions& options, const Tokenizer& tokenizer) {
  if ((options.bos && tokenizer.bos() < 0) || (options.eos && tokenizer.eos() < 0)) {
    fail(ExitCode::kUsage, "{}: the tokenizer has no {} token", tokenizer.path(),
         options.bos && tokenizer.bos() < 0 ? "bos" : "eos");
  }
  StoreInfo info;
  info.vocab = tokenizer.size();
  info.tokenizer_hash = tokenizer.hash();
  info.bos = tokenizer.bos();
  info.eos = tokenizer.eos();
  info.starts_with_bos = options.bos;
  info.ends_with_eos = options.eos;
  return info;
}

}  // namespace

StoreInfo prepare_documents(const PrepareOptions& options, const Tokenizer& tokenizer,
                            const PrepareReport& report) {
  TextInput input(options.inputs);
  check_output(options.output, input.files());
  DocumentWriter writer(options.output, store_format(options, tokenizer));
  EncodingPipeline pipeline(input, tokenizer, options);
  SourceTotals totals;
  PrepareProgress progress{.total_bytes = input.total_bytes(), .left_out = input.left_out()};
  for (Encoded encoded; pipeline.next(encoded);) {
    std::span<const int32_t> rest(encoded.tokens);
    for (const Encoded::Part& document : encoded.documents) {
      writer.append(rest.first(document.tokens), document.last);
      rest = rest.subspan(document.tokens);
      totals.add(document);
      progress.documents += document.last ? 1 : 0;
    }
    progress.bytes += encoded.bytes;
    progress.tokens += static_cast<int64_t>(encoded.tokens.size());
    progress.forced_cuts += encoded.forced_cuts;
    if (report && !report(progress)) throw Interrupted{};
  }
  if (progress.tokens == 0) fail(ExitCode::kUsage, "there is no text in the input");
  return writer.finish(totals.totals(), totals.text_bytes());
}

}  // namespace sbtrain
