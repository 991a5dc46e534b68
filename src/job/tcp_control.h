// What both ends of the star have in common: the thread, the clock, and the calls of other threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/file_descriptor.h"
#include "job/control.h"
#include "job/control_message.h"

namespace sbtrain::control {

using Time = std::chrono::milliseconds;  // of a WatchedClock

// Time during which its thread runs. If the process was stopped, the clock has stood still, so that
// deadlines do not expire in the moment in which it is continued.
class WatchedClock {
 public:
  // `longest`: what passes at most between two ticks.
  explicit WatchedClock(std::chrono::milliseconds longest) : longest_(longest) {}
  Time now() const;
  void tick();  // by the thread, at least as often as `longest`

 private:
  using Real = std::chrono::steady_clock;
  const std::chrono::milliseconds longest_;
  Time counted_{0};
  Real::time_point last_ = Real::now();
};

// What must be called when the job fails. It outlives the Control as long as handles do.
class FailureCallbacks {
 public:
  using Callback = std::function<void(const JobFailure&)>;
  static Control::FailureHandle add(const std::shared_ptr<FailureCallbacks>& self, Callback call);
  void call(const JobFailure& failure);

 private:
  std::mutex mutex_;  // held during calls, so that whoever removes one waits for it
  std::map<int, Callback> callbacks_;
  int next_ = 0;
  std::optional<JobFailure> failure_;
};

class TcpControl : public Control {
 public:
  TcpControl(int rank, int world, const Deadlines& deadlines);

  int rank() const override { return rank_; }
  int world() const override { return world_; }
  std::vector<std::string> exchange(std::string_view topic, std::span<const int> members,
                                    std::string value) override;
  void progress(std::string_view what, std::chrono::milliseconds allowance) override;
  void waits_for(std::string_view what) override;
  void report(const JobFailure& failure) override;
  FailureHandle on_failure(std::function<void(const JobFailure&)> abort) override;
  void check() const override;
  std::optional<JobFailure> failure() const override;
  bool shows_failure() const override;
  void finish() override;

 protected:
  // One round of the thread: waits for wake_fd(), sockets or `interval`, and deals with what came.
  virtual void turn() = 0;
  // Ends what turn() does, on the thread, when the object is destroyed.
  virtual void close() = 0;

  void start_thread();
  void stop_thread();  // to be called by the destructor of the class that has turn()
  void wait_for_start();

  // For turn():
  int wake_fd() const { return wake_.get(); }
  std::chrono::milliseconds interval() const;
  // Empties wake_fd and returns the messages of this rank's other threads.
  std::vector<Message> take_outbox();
  Time now() const;
  void tick();
  Beat beat() const;
  void note_start();
  bool started() const;
  // This rank has been asked to stop before all ranks were there.
  bool stopped_early() const {
    return deadlines_.stopped != nullptr && deadlines_.stopped() && !started();
  }
  void note_end();
  bool ended() const;
  void deliver(Texts texts);
  // The job has failed; only the first failure counts. `shows`: this rank tells the user.
  void note_failure(const JobFailure& failure, bool shows);
  std::optional<JobFailure> own_failure() const;  // what report() is telling rank 0

  const int rank_;
  const int world_;
  const Deadlines deadlines_;

 private:
  using Key = std::pair<std::string, std::vector<uint32_t>>;
  void run();
  void post(Message message);
  void wait_or_throw(std::unique_lock<std::mutex>& lock, const std::function<bool()>& done);

  const FileDescriptor wake_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  WatchedClock clock_;
  std::deque<Message> outbox_;
  std::map<Key, std::deque<std::vector<std::string>>> arrived_;  // of exchanges
  std::string doing_ = "starting";
  std::string waits_for_;
  Time doing_since_{0};
  std::chrono::milliseconds allowance_{0};
  bool started_ = false;
  bool ended_ = false;
  bool shows_failure_ = false;
  std::optional<JobFailure> failure_;
  std::optional<JobFailure> own_failure_;  // while it is being reported
  std::shared_ptr<FailureCallbacks> callbacks_ = std::make_shared<FailureCallbacks>();
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  std::thread aborting_;  // calls the callbacks, which may block, beside thread_
};

// "0, 1, 3-5" for {0, 1, 3, 4, 5}.
std::string describe_ranks(const std::vector<int>& ranks);

}  // namespace sbtrain::control
