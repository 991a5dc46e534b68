// The ranks that share the tokens of a micro-batch (core/context_share.h), by a communicator.
#pragma once

#include <string_view>

#include "core/context_share.h"
#include "parallel/communicator.h"
#include "parallel/wait_times.h"

namespace sbtrain {

class ContextRing : public ContextRanks {
 public:
  // Transfers are work of the stream `communication`, like all other collectives of a step: so the
  // ranks start all of them in the same order, that of the step itself. Waits for them are timed by
  // `waits`, as kAwait in a profile. All must outlive the ring.
  static constexpr std::string_view kAwait = "await_context";
  ContextRing(Communicator& ranks, Stream& communication, WaitTimes& waits)
      : ranks_(ranks), communication_(communication), waits_(waits) {}
  int place() const override { return ranks_.rank(); }
  int size() const override { return ranks_.world(); }
  Event start_shift(Stream& s, const Buffer& to, const Buffer& from, int step) override;
  Event start_sum(Stream& s, const Buffer& part, const Buffer& parts) override;
  void await(Stream& s, const Event& started) override;

 private:
  // Gives `transfer` to the other stream, for the memory of both.
  template <typename Transfer>
  Event start(Stream& s, const Buffer& to, const Buffer& from, const Transfer& transfer);
  Communicator& ranks_;
  Stream& communication_;
  WaitTimes& waits_;
};

}  // namespace sbtrain
