// A world of ranks that are threads of this process, on the CPU: the arithmetic of many ranks
// without many processes. Collectives are done by the last rank that arrives, in rank order, so
// every rank has the same bits. Ranks that call different collectives all throw
// ExitCode::kInternal, which says what each of them called; when a rank leaves (its communicator
// is destroyed), the calls of the others throw ExitCode::kCommunication. Nothing here waits for
// ever, except for a rank that neither calls nor leaves.
#pragma once

#include <omp.h>

#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/error.h"
#include "parallel/communicator.h"
#include "parallel/element_sum.h"

namespace sbtrain::test {

class ThreadRank : public Communicator {
 public:
  static std::vector<std::unique_ptr<Communicator>> make(int world) {
    const auto meeting = std::make_shared<Meeting>(world);
    std::vector<std::unique_ptr<Communicator>> ranks;
    for (int rank = 0; rank < world; ++rank) ranks.emplace_back(new ThreadRank(meeting, rank));
    return ranks;
  }
  ~ThreadRank() override { meeting_->leave(rank_); }

  int rank() const override { return rank_; }
  int world() const override { return meeting_->world(); }

  void sum(std::span<double> values) override {
    Call mine{.what = fmt::format("sum of {} values", values.size()),
              .full = Tensor(values.data(), DType::kF64, {static_cast<int64_t>(values.size())})};
    meeting_->meet(rank_, mine, sum_of_all);
  }
  std::string broadcast(std::string value, int root) override {
    require(root >= 0 && root < world(), "broadcast: no rank {} among {}", root, world());
    Call mine{.what = fmt::format("broadcast of a text by rank {}", root),
              .text = std::move(value)};
    meeting_->meet(rank_, mine, [&](Calls calls) {
      for (Call* call : calls) call->texts = {calls[root]->text};
    });
    return mine.texts.front();
  }
  std::vector<std::string> all_gather(std::string value) override {
    Call mine{.what = "all_gather of texts", .text = std::move(value)};
    meeting_->meet(rank_, mine, [](Calls calls) {
      for (Call* to : calls) {
        for (const Call* from : calls) to->texts.push_back(from->text);
      }
    });
    return mine.texts;
  }
  void barrier() override {
    Call mine{.what = "barrier"};
    meeting_->meet(rank_, mine, [](Calls) {});
  }
  std::unique_ptr<Communicator> split(const ColorOf& color_of) override {
    Call mine{.what = "split into the colors"};
    for (int r = 0; r < world(); ++r) mine.what += fmt::format(" {}", color_of(r));
    meeting_->meet(rank_, mine, [&](Calls calls) {
      std::map<int, int> sizes;
      for (int r = 0; r < world(); ++r) calls[r]->group_rank = sizes[color_of(r)]++;
      std::map<int, std::shared_ptr<Meeting>> groups;
      for (const auto& [color, size] : sizes) groups[color] = std::make_shared<Meeting>(size);
      for (int r = 0; r < world(); ++r) calls[r]->group = groups[color_of(r)];
    });
    return std::unique_ptr<Communicator>(new ThreadRank(mine.group, mine.group_rank));
  }

 protected:
  void run_all_gather(Stream&, const Tensor& full, const Tensor& shard) override {
    Call mine{.what = "all_gather of " + shard.describe(), .full = full, .shard = shard};
    meeting_->meet(rank_, mine, [](Calls calls) {
      for (const Call* to : calls) {
        for (size_t r = 0; r < calls.size(); ++r) move(part(to->full, r, calls), calls[r]->shard);
      }
    });
  }
  void run_reduce_scatter(Stream&, const Tensor& shard, const Tensor& full) override {
    Call mine{.what = "reduce_scatter of " + full.describe(), .full = full, .shard = shard};
    // A shard may lie in `full`, so all sums are formed before the first shard is written.
    meeting_->meet(rank_, mine, [](Calls calls) {
      sum_of_all(calls);
      for (size_t r = 0; r < calls.size(); ++r) {
        move(calls[r]->shard, part(calls[r]->full, r, calls));
      }
    });
  }
  void run_all_to_all(Stream&, const Tensor& to, const Tensor& from) override {
    Call mine{.what = "all_to_all of " + from.describe(), .full = from, .shard = to};
    meeting_->meet(rank_, mine, [](Calls calls) {
      for (size_t r = 0; r < calls.size(); ++r) {
        for (size_t q = 0; q < calls.size(); ++q) {
          if (q == r) continue;  // undefined
          move(part(calls[r]->shard, q, calls), part(calls[q]->full, r, calls));
        }
      }
    });
  }
  void run_shift(Stream&, const Tensor& to, const Tensor& from, Neighbours ring) override {
    const int step = (ring.target - rank_ + world()) % world();
    Call mine{.what = fmt::format("shift of {} by {}", from.describe(), step),
              .full = from,
              .shard = to,
              .source = ring.source};
    meeting_->meet(rank_, mine, [](Calls calls) {
      for (const Call* call : calls) move(call->shard, calls[call->source]->full);
    });
  }
  void run_all_reduce(Stream&, const Tensor& x) override {
    Call mine{.what = "all_reduce of " + x.describe(), .full = x};
    meeting_->meet(rank_, mine, sum_of_all);
  }
  void run_broadcast(Stream&, const Tensor& x, int root) override {
    Call mine{.what = fmt::format("broadcast of {} by rank {}", x.describe(), root), .full = x};
    meeting_->meet(rank_, mine, [&](Calls calls) {
      for (const Call* to : calls) move(to->full, calls[root]->full);
    });
  }

 private:
  struct Call;
  using Calls = std::span<Call* const>;  // of all ranks

  // Where the ranks meet, one collective after the other.
  class Meeting {
   public:
    explicit Meeting(int world) : calls_(world), gone_(world) {}
    int world() const { return static_cast<int>(calls_.size()); }

    // Returns when every rank has come with an equal call, and the last of them has run `act`.
    void meet(int rank, Call& call, const std::function<void(Calls)>& act) {
      std::unique_lock lock(mutex_);
      for (size_t r = 0; r < gone_.size(); ++r) {
        if (gone_[r]) lose(static_cast<int>(r), call.what);
      }
      if (failure_) std::rethrow_exception(failure_);
      calls_[rank] = &call;
      const int64_t round = round_;
      if (++arrived_ == world()) {
        finish(act);
      } else {
        changed_.wait(lock, [&] { return round_ != round || failure_; });
      }
      if (round_ == round) std::rethrow_exception(failure_);
    }

    void leave(int rank) {
      const std::lock_guard lock(mutex_);
      gone_[rank] = true;
      for (const Call* call : calls_) {
        if (call) lose(rank, call->what);
      }
    }

   private:
    void finish(const std::function<void(Calls)>& act) {
      try {
        for (int r = 1; r < world(); ++r) {
          if (calls_[r]->what == calls_[0]->what) continue;
          fail(ExitCode::kInternal, "rank 0 calls {}, but rank {} calls {}", calls_[0]->what, r,
               calls_[r]->what);
        }
        act(calls_);
        calls_.assign(calls_.size(), nullptr);
        arrived_ = 0;
        ++round_;
      } catch (...) {
        failure_ = std::current_exception();
      }
      changed_.notify_all();
    }
    void lose(int rank, const std::string& what) {
      if (failure_) return;
      failure_ = std::make_exception_ptr(
          Error(ExitCode::kCommunication,
                fmt::format("rank {} left, and is missing from {}", rank, what)));
      changed_.notify_all();
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Call*> calls_;  // null: the rank has not come yet
    std::vector<bool> gone_;
    int arrived_ = 0;
    int64_t round_ = 0;
    std::exception_ptr failure_;  // once set, every later call throws it too
  };

  struct Call {
    std::string what;  // equal on all ranks
    Tensor full = {};
    Tensor shard = {};
    int source = 0;  // of a shift
    std::string text = {};
    // Results.
    std::vector<std::string> texts = {};
    std::shared_ptr<Meeting> group = {};
    int group_rank = 0;
  };

  ThreadRank(std::shared_ptr<Meeting> meeting, int rank)
      : meeting_(std::move(meeting)), rank_(rank) {}

  static Tensor part(const Tensor& full, size_t rank, Calls calls) {
    const int64_t n = full.numel() / static_cast<int64_t>(calls.size());
    return full.reshaped({full.numel()}).row_range(n * static_cast<int64_t>(rank), n);
  }
  static void move(const Tensor& to, const Tensor& from) {
    if (to.bytes() > 0) std::memmove(to.data, from.data, from.bytes());
  }
  static void sum_of_all(Calls calls) {
    const Tensor& first = calls[0]->full;
    for (size_t r = 1; r < calls.size(); ++r) {
      add_elements(first.dtype, first.data, calls[r]->full.data, first.numel());
    }
    for (size_t r = 1; r < calls.size(); ++r) move(calls[r]->full, first);
  }

  std::shared_ptr<Meeting> meeting_;
  int rank_;
};

// Runs `body` on `world` ranks, each in a thread with a communicator of its own, which it loses
// when the body returns or throws. Returns what each rank threw; null where it returned.
inline std::vector<std::exception_ptr> run_ranks_and_catch(
    int world, const std::function<void(Communicator&)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Communicator>> ranks = ThreadRank::make(world);
  for (size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      omp_set_num_threads(1);  // the ranks have the processors busy already
      const std::unique_ptr<Communicator> mine = std::move(ranks[r]);
      try {
        body(*mine);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// The same; throws what the ranks threw. A rank that ends with an error makes the others fail with
// ExitCode::kCommunication, so an error of another kind comes first: it is the cause.
inline void run_ranks(int world, const std::function<void(Communicator&)>& body) {
  std::exception_ptr cause;
  for (const std::exception_ptr& error : run_ranks_and_catch(world, body)) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (const Error& e) {
      if (!cause || e.code() != ExitCode::kCommunication) cause = error;
    } catch (...) {
      cause = error;
    }
  }
  if (cause) std::rethrow_exception(cause);
}

}  // namespace sbtrain::test
