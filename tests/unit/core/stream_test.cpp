// Several streams of one device: events order their work, and a plan never gives memory to a stream
// while another stream may still be using it.
#include "core/stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/philox.h"

namespace sbtrain {
namespace {

constexpr MemoryClass kClass = MemoryClass::kScratch;
constexpr int64_t kElements = 1 << 10;
constexpr size_t kBytes = kElements * 4;

// ---- Order --------------------------------------------------------------------------------------

TEST(StreamOrder, OnlyAnEventAfterTheWorkCoversIt) {
  StreamOrder order;
  const int a = order.stream("a");
  const int b = order.stream("b");
  EXPECT_EQ(order.stream("a"), a);
  const StreamClock early = order.record(a);
  const StreamMark work = order.now(a);
  EXPECT_TRUE(covers(order.clock(a), work));  // its own work is always in order
  EXPECT_FALSE(covers(order.clock(b), work));
  order.wait(b, early);
  EXPECT_FALSE(covers(order.clock(b), work));
  order.wait(b, order.record(a));
  EXPECT_TRUE(covers(order.clock(b), work));
  EXPECT_FALSE(covers(order.clock(b), order.now(a)));
}

TEST(StreamOrder, EventsCarryWhatTheirStreamWaitedFor) {
  StreamOrder order;
  const int a = order.stream("a");
  const int b = order.stream("b");
  const int c = order.stream("c");
  const StreamMark work = order.now(a);
  order.wait(b, order.record(a));
  order.wait(c, order.record(b));
  EXPECT_TRUE(covers(order.clock(c), work));
  EXPECT_FALSE(covers(order.clock(a), order.now(b)));
}

// ---- Memory -------------------------------------------------------------------------------------

// A step that fetches two buffers on a communication stream and works on each with the compute
// stream. With `covered`, the second fetch waits for the work on the first, after its release.
void fetch_twice(Memory& memory, bool covered) {
  Stream compute(memory);
  Stream communication(memory, "communication", StreamPriority::kHigh);
  {
    const ProgramScope program(memory, "step");
    Event begun, fetched, worked;
    compute.record(begun);
    communication.wait(begun);
    for (int i = 0; i < 2; ++i) {
      Buffer buffer = communication.allocate(kClass, "fetched", DType::kF32, {kElements});
      communication.record(fetched);
      compute.wait(fetched);
      compute.use(buffer);
      buffer.release();
      compute.record(worked);
      if (covered || i == 1) communication.wait(worked);
    }
  }
  Event end;
  communication.record(end);
  compute.wait(end);
}

TEST(Streams, MemoryGoesToAnotherStreamOnlyAfterAnEvent) {
  for (const bool covered : {false, true}) {
    Memory plan(Backend::kPlan);
    fetch_twice(plan, covered);
    EXPECT_EQ(plan.report().pool_bytes, covered ? kBytes : 2 * kBytes);
    EXPECT_EQ(plan.report().programs[0].peak_bytes, kBytes);
    Memory memory(Backend::kCpu);
    memory.poison();
    memory.adopt_plan(plan);
    for (int run = 0; run < 3; ++run) fetch_twice(memory, covered);
    EXPECT_THROW(fetch_twice(memory, !covered), Error);  // other waits than its plan's
  }
}

TEST(Streams, OneStreamReusesItsOwnMemoryWithoutEvents) {
  Memory plan(Backend::kPlan);
  Stream stream(plan, "communication");
  Stream compute(plan);
  Event begun;
  const ProgramScope program(plan, "step");
  compute.record(begun);
  stream.wait(begun);
  for (int i = 0; i < 3; ++i)
    const Buffer b = stream.allocate(kClass, "b", DType::kF32, {kElements});
  plan.end();
  EXPECT_EQ(plan.report().pool_bytes, kBytes);
}

TEST(Streams, UseNeedsAnEventAfterTheAllocation) {
  Memory memory(Backend::kCpu);
  Stream compute(memory);
  Stream communication(memory, "communication");
  const Buffer buffer = compute.allocate(kClass, "buffer", DType::kF32, {kElements});
  EXPECT_NO_THROW(compute.use(buffer));
  EXPECT_THROW(communication.use(buffer), Error);
  Event there;
  compute.record(there);
  communication.wait(there);
  EXPECT_NO_THROW(communication.use(buffer));
  EXPECT_TRUE(there.done());
  there.synchronize();
}

TEST(Streams, AProgramBeginsAndEndsWithTheComputeStream) {
  Memory plan(Backend::kPlan);
  Stream compute(plan);
  Stream communication(plan, "communication");
  Event event;
  {
    const ProgramScope program(plan, "step");
    EXPECT_THROW(communication.allocate(kClass, "early", DType::kF32, {kElements}), Error);
    compute.record(event);
    communication.wait(event);
    const Buffer buffer = communication.allocate(kClass, "buffer", DType::kF32, {kElements});
  }
  EXPECT_THROW(plan.begin("next"), Error);  // communication may still use the memory
  communication.record(event);
  compute.wait(event);
  plan.begin("next");
  plan.end();
}

// Without a plan, memory that is released outside of a program follows the same rule.
TEST(Streams, SpareMemoryWaitsForAnEventToo) {
  Memory memory(Backend::kCpu);
  memory.poison();  // keeps released memory
  Stream compute(memory);
  Stream communication(memory, "communication");
  Buffer buffer = compute.allocate(kClass, "buffer", DType::kF32, {kElements});
  const void* released = buffer.tensor().data;
  buffer.release();
  Buffer other = communication.allocate(kClass, "other", DType::kF32, {kElements});
  EXPECT_NE(other.tensor().data, released);
  Event event;
  compute.record(event);
  communication.wait(event);
  const Buffer third = communication.allocate(kClass, "third", DType::kF32, {kElements});
  EXPECT_EQ(third.tensor().data, released);
}

// ---- Simulated streams --------------------------------------------------------------------------

// Queues of work, which runs later in any order that the waits allow.
class SimulatedDevice {
 public:
  explicit SimulatedDevice(int streams) : queues_(streams) {}
  void work(int stream, std::function<void()> run) { queues_[stream].push_back({std::move(run)}); }
  // Returns the event.
  size_t record(int stream) {
    reached_.push_back(false);
    queues_[stream].push_back({nullptr, static_cast<int>(reached_.size()) - 1, -1});
    return reached_.size() - 1;
  }
  void wait(int stream, size_t event) {
    queues_[stream].push_back({nullptr, -1, static_cast<int>(event)});
  }

  // Lets a stream drawn at random run for a while, then another.
  void run(const Philox& random) {
    uint64_t draws = 0;
    while (std::any_of(queues_.begin(), queues_.end(), [](const auto& q) { return !q.empty(); })) {
      auto& queue = queues_[random.bits(draws++) % queues_.size()];
      const uint64_t patience = random.bits(draws++) % 40;
      for (uint64_t i = 0; i < patience && !queue.empty(); ++i) {
        const Item& item = queue.front();
        if (item.awaited >= 0 && !reached_[item.awaited]) break;
        if (item.run) item.run();
        if (item.reached >= 0) reached_[item.reached] = true;
        queue.pop_front();
      }
    }
  }

 private:
  struct Item {
    std::function<void()> run;
    int reached = -1;
    int awaited = -1;
  };
  std::vector<std::deque<Item>> queues_;
  std::vector<bool> reached_;
};

// Streams that allocate, use, release and wait at random, in the same way for every memory. The
// first user of a buffer fills it with the buffer's number, which every later user must find there.
class RandomProgram {
 public:
  RandomProgram(Memory& memory, uint64_t seed)
      : memory_(memory), random_(seed, RandomPurpose::kTest, "streams"), device_(kStreams) {
    for (const char* name : {kComputeStream, "gather", "reduce"})
      streams_.emplace_back(memory, name);
  }

  // Returns the number of values that were found overwritten.
  int run(uint64_t schedule) {
    {
      const ProgramScope program(memory_, "random");
      record(0);
      wait(1, events_.size() - 1);
      wait(2, events_.size() - 1);
      for (int i = 0; i < 150; ++i) act(i);
      live_.clear();
    }
    for (const int stream : {1, 2}) {
      record(stream);
      wait(0, events_.size() - 1);
    }
    device_.run(Philox(schedule, RandomPurpose::kTest, "schedule"));
    return overwritten_;
  }

 private:
  static constexpr int kStreams = 3;
  struct Live {
    Buffer buffer;
    int number;
    size_t written;  // the event after the first use
  };

  uint64_t below(uint64_t bound) { return random_.bits(draws_++) % bound; }
  void record(int stream) {
    events_.push_back(std::make_unique<Event>());
    streams_[stream].record(*events_.back());
    device_.record(stream);
  }
  void wait(int stream, size_t event) {
    streams_[stream].wait(*events_[event]);
    device_.wait(stream, event);
  }

  void act(int number) {
    const uint64_t choice = below(100);
    const int stream = static_cast<int>(below(kStreams));
    if (choice < 35 || live_.empty()) {
      allocate(number, stream);
    } else if (choice < 55) {
      Live& live = live_[below(live_.size())];
      wait(stream, live.written);
      streams_[stream].use(live.buffer);
      check(stream, live);
    } else if (choice < 85) {
      live_.erase(live_.begin() + static_cast<int64_t>(below(live_.size())));
    } else {
      record(stream);
      wait(static_cast<int>(below(kStreams)), events_.size() - 1);
    }
  }
  void allocate(int number, int stream) {
    const auto size = static_cast<int64_t>(1 + below(2000));
    Live live{streams_[stream].allocate(kClass, "buffer", DType::kF32, {size}), number, 0};
    const Tensor t = live.buffer;
    if (t.data) {
      device_.work(stream, [=] { std::fill_n(t.f32(), size, static_cast<float>(number)); });
    }
    record(stream);
    live.written = events_.size() - 1;
    check(stream, live);
    live_.push_back(std::move(live));
  }
  void check(int stream, const Live& live) {
    const Tensor t = live.buffer;
    const auto number = static_cast<float>(live.number);
    if (!t.data) return;
    device_.work(stream, [=, this] {
      overwritten_ += static_cast<int>(
          std::count_if(t.f32(), t.f32() + t.numel(), [=](float x) { return x != number; }));
    });
  }

  Memory& memory_;
  Philox random_;
  uint64_t draws_ = 0;
  SimulatedDevice device_;
  std::vector<Stream> streams_;
  std::vector<std::unique_ptr<Event>> events_;
  std::vector<Live> live_;
  int overwritten_ = 0;
};

TEST(Streams, NoScheduleLetsAStreamOverwriteWhatAnotherWorksOn) {
  size_t peak = 0;
  size_t pool = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    Memory plan(Backend::kPlan);
    RandomProgram(plan, seed).run(0);
    peak += plan.report().programs[0].peak_bytes;
    pool += plan.report().pool_bytes;
    Memory memory(Backend::kCpu);
    memory.adopt_plan(plan);
    for (uint64_t schedule = 0; schedule < 10; ++schedule) {
      RandomProgram program(memory, seed);
      ASSERT_EQ(program.run(schedule), 0) << "seed " << seed << " schedule " << schedule;
    }
  }
  EXPECT_LT(pool, 3 * peak);  // and memory is used again: 50 buffers of a program are live once
}

}  // namespace
}  // namespace sbtrain
