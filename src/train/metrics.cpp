#include "train/metrics.h"

#include <chrono>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <functional>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "core/log.h"
#include "core/number_text.h"
#include "train/bits.h"
#include "train/jsonl.h"
#include "train/progress.h"
#include "train/tensorboard.h"

namespace sbtrain {

namespace {

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// Seconds of training; the clock stands still between pause() and resume().
class TrainingClock {
 public:
  double seconds() const { return total_ + (paused_ > 0 ? 0.0 : running()); }
  void pause() {
    if (paused_++ == 0) total_ += running();
  }
  void resume() {
    if (--paused_ == 0) since_ = std::chrono::steady_clock::now();
  }

 private:
  double running() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - since_).count();
  }
  std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  double total_ = 0.0;
  int paused_ = 0;  // pauses may be nested
};

// Steps per second, where a step that ended ten seconds ago counts half.
class RecentRate {
 public:
  void add(double steps, double seconds) {
    const double keep = std::exp2(-seconds / 10.0);
    steps_ = steps_ * keep + steps;
    seconds_ = seconds_ * keep + seconds;
  }
  double per_second() const { return seconds_ > 0.0 ? steps_ / seconds_ : std::nan(""); }

 private:
  double steps_ = 0.0;
  double seconds_ = 0.0;
};

// A file of records.
struct Sink {
  std::function<void(const MetricRecord&)> write;
  std::function<void()> sync;
};

// Writes records to the files on a separate thread.
class FileThread {
 public:
  explicit FileThread(std::vector<Sink> sinks)
      : sinks_(std::move(sinks)), thread_([this] { run(); }) {}
  ~FileThread() {
    {
      const std::lock_guard lock(mutex_);
      done_ = true;
    }
    work_.notify_one();
    thread_.join();
  }
  FileThread(const FileThread&) = delete;
  FileThread& operator=(const FileThread&) = delete;

  void push(MetricRecord record) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(record));
    }
    work_.notify_one();
  }

  void flush() {
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [this] { return queue_.empty(); });
  }

  void sync() const {
    for (const Sink& sink : sinks_) sink.sync();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      work_.wait(lock, [this] { return done_ || !queue_.empty(); });
      if (queue_.empty()) return;
      // A record leaves the queue after it is written, so an empty queue means that all are.
      const MetricRecord& record = queue_.front();
      lock.unlock();
      for (const Sink& sink : sinks_) sink.write(record);
      lock.lock();
      queue_.pop_front();
      if (queue_.empty()) idle_.notify_all();
    }
  }

  const std::vector<Sink> sinks_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable idle_;
  std::deque<MetricRecord> queue_;
  bool done_ = false;
  std::thread thread_;  // last: it uses the members above
};

// A sink that drops a record that it cannot write, and reports the first of consecutive failures.
template <typename Writer>
Sink forgiving(std::shared_ptr<Writer> writer) {
  Sink sink;
  sink.write = [writer, failing = false](const MetricRecord& record) mutable {
    try {
      writer->write(record);
      failing = false;
    } catch (const std::exception& error) {
      if (!failing) log_warning("metrics of step {} are lost: {}", record.step, error.what());
      failing = true;
    }
  };
  sink.sync = [writer, failing = false]() mutable {
    try {
      writer->sync();
      failing = false;
    } catch (const std::exception& error) {
      if (!failing) log_warning("metrics may be lost: {}", error.what());
      failing = true;
    }
  };
  return sink;
}

// Markdown that shows the text as it is.
std::string as_code(const std::string& text) {
  std::string code;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) code += "    " + line + '\n';
  return code;
}

std::vector<Sink> open_files(const MetricsOptions& options) {
  namespace fs = std::filesystem;
  std::vector<Sink> sinks;
  if (!options.config.jsonl && !options.config.tensorboard) return sinks;
  make_folders(options.run_dir);
  if (options.config.jsonl) {
    sinks.push_back(forgiving(
        std::make_shared<JsonlWriter>((fs::path(options.run_dir) / "metrics.jsonl").string(),
                                      options.resumed_step, options.tokens_per_step)));
  }
  if (options.config.tensorboard) {
    auto writer = std::make_shared<TensorboardWriter>(
        (fs::path(options.run_dir) / "tensorboard").string(), options.resumed_step);
    if (!options.config_yaml.empty()) {
      writer->write_text("config", as_code(options.config_yaml), options.resumed_step.value_or(0));
    }
    sinks.push_back(forgiving(std::move(writer)));
  }
  return sinks;
}

// The device measures the waits, and the host the time, which may say a little less.
double exposed_share(double waited, double seconds) {
  return std::min(1.0, waited / seconds);
}

}  // namespace

struct Metrics::Impl {
  explicit Impl(const MetricsOptions& o)
      : options(o),
        files(open_files(o)),
        progress(o.config.progress ? std::make_unique<Progress>(o.progress_fd) : nullptr),
        last_step(o.resumed_step.value_or(0)),
        recorded_step(last_step) {}

  double mfu(double tokens_per_second) const {
    if (options.peak_flops <= 0.0 || options.flops_per_token <= 0.0) return std::nan("");
    return tokens_per_second * options.flops_per_token / options.peak_flops;
  }

  void show(const StepMetrics& s);
  bool due(int64_t step) const;
  bool shows_waits() const { return options.world > 1 && options.times_waits; }
  std::vector<Metric> values(const StepMetrics& s);

  const MetricsOptions options;
  FileThread files;
  std::unique_ptr<Progress> progress;
  TrainingClock clock;
  RecentRate rate;
  int64_t last_step;
  double last_seconds = 0.0;
  int64_t recorded_step;
  double recorded_seconds = 0.0;
  double waited = 0.0;  // since the last record
  double exposed = std::nan("");
};

void Metrics::Impl::show(const StepMetrics& s) {
  const double now = s.ended.value_or(clock.seconds());
  rate.add(static_cast<double>(s.step - last_step), now - last_seconds);
  if (shows_waits() && now > last_seconds) {
    exposed = exposed_share(s.waited, now - last_seconds);
  }
  waited += s.waited;
  last_step = s.step;
  last_seconds = now;
  if (!progress) return;
  const double per_second = rate.per_second();
  const double tokens_per_second = per_second * static_cast<double>(options.tokens_per_step);
  progress->update(
      {.step = s.step,
       .total_steps = options.total_steps,
       .loss = s.loss,
       .lr = s.lr,
       .grad_norm = s.grad_norm,
       .tokens_per_second = tokens_per_second,
       .ranks = options.world,
       .exposed = exposed,
       .mfu = mfu(tokens_per_second),
       .seconds_left = static_cast<double>(options.total_steps - s.step) / per_second});
}

bool Metrics::Impl::due(int64_t step) const {
  return step == 1 || step == options.total_steps ||
         step % std::max<int64_t>(options.config.every, 1) == 0;
}

std::vector<Metric> Metrics::Impl::values(const StepMetrics& s) {
  std::vector<Metric> values = {{metric::kTrainLoss, s.loss},
                                {metric::kTrainLr, s.lr},
                                {metric::kTrainGradNorm, s.grad_norm},
                                {metric::kTrainSkipped, static_cast<double>(s.skipped_steps)},
                                {metric::kTrainSpikes, static_cast<double>(s.spike_steps)},
                                {metric::kTrainStage, static_cast<double>(s.stage)}};
  const double seconds = last_seconds - recorded_seconds;
  if (seconds > 0.0 && s.step > recorded_step) {
    const double tokens_per_second = static_cast<double>(s.step - recorded_step) *
                                     static_cast<double>(options.tokens_per_step) / seconds;
    values.push_back({metric::kTrainTokensPerSecond, tokens_per_second});
    if (shows_waits()) {
      values.push_back({metric::kTrainExposed, exposed_share(waited, seconds)});
    }
    if (const double value = mfu(tokens_per_second); std::isfinite(value)) {
      values.push_back({metric::kTrainMfu, value});
    }
  }
  recorded_step = s.step;
  recorded_seconds = last_seconds;
  waited = 0.0;
  return values;
}

Metrics::Metrics(const MetricsOptions& options) {
  if (options.rank == 0) impl_ = std::make_unique<Impl>(options);
}

Metrics::~Metrics() = default;

void Metrics::train_step(const StepMetrics& step) {
  if (!impl_) return;
  impl_->show(step);
  if (impl_->due(step.step)) record(step.step, impl_->values(step));
}

void Metrics::validation(int64_t step, const ValidationMetrics& result) {
  if (!impl_) return;
  const double bits = bits_per_byte(result.loss, result.tokens, result.bytes);
  std::vector<Metric> values = {{metric::kValidationLoss, result.loss},
                                {metric::kValidationPerplexity, perplexity(result.loss)}};
  std::string line = fmt::format("validation  step {}  loss {:.4f} nats/token", step,
                                 without_nan_sign(result.loss));
  if (std::isfinite(bits)) {
    values.push_back({metric::kValidationBitsPerByte, bits});
    line += fmt::format("  {:.4f} bits/byte", bits);
  }
  line += fmt::format("  perplexity {:.2f}", perplexity(result.loss));
  if (result.accuracy) {
    values.push_back({metric::kValidationAccuracy, *result.accuracy});
    line += fmt::format("  accuracy {:.4f}", *result.accuracy);
  }
  record(step, std::move(values));
  if (impl_->progress) impl_->progress->print(line);
}

void Metrics::record(int64_t step, std::vector<Metric> values) {
  if (impl_) impl_->files.push({step, wall_time(), std::move(values)});
}

double Metrics::seconds() const {
  return impl_ ? impl_->clock.seconds() : 0.0;
}

void Metrics::pause() {
  if (impl_) impl_->clock.pause();
}

void Metrics::resume() {
  if (impl_) impl_->clock.resume();
}

void Metrics::flush() {
  if (impl_) impl_->files.flush();
}

void Metrics::sync() const {
  if (impl_) impl_->files.sync();
}

}  // namespace sbtrain
