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
#include "data/text_input.h"

namespace sbtrain {
namespace {

constexpr int64_t kTaskBytes = 256 * 1024;  // enough to make handing it over cheap

// A run of documents, in the order of the input.
struct Task {
  int64_t number = 0;
  int64_t bytes = 0;  // of the input
  std::vector<RawDocument> documents;
};

struct Encoded {
  struct Part {
    std::string source;
    int64_t text_bytes = 0;
    size_t tokens = 0;
  };
  int64_t bytes = 0;
  std::vector<Part> documents;
  std::vector<int32_t> tokens;  // of all of them
};

Encoded encode(Task task, const Tokenizer& tokenizer, const PrepareOptions& options) {
  Encoded result;
  result.bytes = task.bytes;
  for (RawDocument& raw : task.documents) {
    Document document = parse_document(std::move(raw));
    if (document.text.empty()) continue;
    const size_t before = result.tokens.size();
    if (options.bos) result.tokens.push_back(tokenizer.bos());
    tokenizer.encode(document.text, result.tokens);
    if (options.eos) result.tokens.push_back(tokenizer.eos());
    result.documents.push_back({std::move(document.source),
                                static_cast<int64_t>(document.text.size()),
                                result.tokens.size() - before});
  }
  return result;
}

// One thread reads, several encode, and the caller takes the results in the input's order. At
// most a few tasks for each thread are under way, so memory does not grow with the input.
class EncodingPipeline {
 public:
  EncodingPipeline(TextInput& input, const Tokenizer& tokenizer, const PrepareOptions& options)
      : input_(input), tokenizer_(tokenizer), options_(options) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const int encoders = std::max(1, options.threads > 0 ? options.threads : cores);
    limit_ = 4 * encoders;
    threads_.emplace_back([this] { guarded(&EncodingPipeline::read); });
    for (int i = 0; i < encoders; ++i) {
      threads_.emplace_back([this] { guarded(&EncodingPipeline::work); });
    }
  }

  ~EncodingPipeline() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // False at the end of the input. Rethrows what went wrong in a thread.
  bool next(Encoded& result) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return error_ || done_.contains(taken_) || taken_ == tasks_; });
    if (error_) std::rethrow_exception(error_);
    if (taken_ == tasks_) return false;
    result = std::move(done_.extract(taken_).mapped());
    ++taken_;
    lock.unlock();
    changed_.notify_all();
    return true;
  }

 private:
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
    int64_t number = 0;
    bool more = true;
    while (more) {
      Task task{.number = number, .bytes = 0, .documents = {}};
      RawDocument document;
      while (task.bytes < kTaskBytes && (more = input_.next(document))) {
        task.bytes += static_cast<int64_t>(document.data.size()) + (document.line > 0 ? 1 : 0);
        task.documents.push_back(std::move(document));
      }
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || number - taken_ < limit_; });
      if (stop_) return;
      if (!task.documents.empty()) {
        waiting_.push_back(std::move(task));
        ++number;
      }
      if (!more) tasks_ = number;
      lock.unlock();
      changed_.notify_all();
    }
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
  int64_t tasks_ = -1;  // in all, once it is known
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
};

// Totals by source, in the order of their first document.
class SourceTotals {
 public:
  void add(const Encoded::Part& document) {
    const auto [entry, is_new] = index_.try_emplace(document.source, totals_.size());
    if (is_new) totals_.push_back({.name = document.source});
    StoreSource& total = totals_[entry->second];
    ++total.documents;
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
  DocumentWriter writer(options.output, store_format(options, tokenizer));
  EncodingPipeline pipeline(input, tokenizer, options);
  SourceTotals totals;
  PrepareProgress progress{.total_bytes = input.total_bytes()};
  for (Encoded encoded; pipeline.next(encoded);) {
    std::span<const int32_t> rest(encoded.tokens);
    for (const Encoded::Part& document : encoded.documents) {
      writer.append(rest.first(document.tokens));
      rest = rest.subspan(document.tokens);
      totals.add(document);
    }
    progress.bytes += encoded.bytes;
    progress.documents += static_cast<int64_t>(encoded.documents.size());
    progress.tokens += static_cast<int64_t>(encoded.tokens.size());
    if (report && !report(progress)) throw Interrupted{};
  }
  if (progress.tokens == 0) fail(ExitCode::kUsage, "there is no text in the input");
  return writer.finish(totals.totals(), totals.text_bytes());
}

}  // namespace sbtrain
