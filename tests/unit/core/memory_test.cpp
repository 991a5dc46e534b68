#include "core/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/memory_plan.h"
#include "core/philox.h"

namespace sbtrain {
namespace {

constexpr DType kF32 = DType::kF32;

// The program of the tests: like a step, with buffers that outlive others.
void small_step(Memory& memory, int64_t tokens) {
  ProgramScope scope(memory, "step");
  const Buffer saved = memory.allocate(MemoryClass::kActivations, "saved", kF32, {tokens, 100});
  { const Buffer scratch = memory.allocate(MemoryClass::kScratch, "scratch", kF32, {tokens, 50}); }
  const Buffer logits = memory.allocate(MemoryClass::kLogits, "logits", kF32, {tokens, 200});
}

bool holds(const Buffer& buffer, uint8_t value) {
  const auto* bytes = static_cast<const uint8_t*>(buffer.tensor().data);
  return std::all_of(bytes, bytes + buffer.tensor().bytes(), [=](uint8_t b) { return b == value; });
}

TEST(Memory, PersistentBuffersAreCountedByClass) {
  Memory memory(Backend::kCpu);
  Buffer w = memory.allocate(MemoryClass::kWeights, "w", kF32, {10, 10});
  Buffer g = memory.allocate(MemoryClass::kGradients, "g", kF32, {10});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(w.tensor().data) % 256, 0u);
  EXPECT_EQ(memory.report().persistent[static_cast<int>(MemoryClass::kWeights)], 400u);
  EXPECT_EQ(memory.report().persistent[static_cast<int>(MemoryClass::kGradients)], 40u);
  EXPECT_EQ(memory.report().total_bytes(), 440u);
  Buffer moved = std::move(w);
  EXPECT_FALSE(w.tensor().defined());  // NOLINT(bugprone-use-after-move): it must be empty
  moved = std::move(g);                // releases the first buffer
  EXPECT_EQ(memory.report().total_bytes(), 40u);
  moved.release();
  EXPECT_EQ(memory.report().total_bytes(), 0u);
}

TEST(Memory, PlanningAllocatesNothingAndReportsThePeak) {
  Memory plan(Backend::kPlan);
  const Buffer w = plan.allocate(MemoryClass::kWeights, "w", kF32, {int64_t{1} << 40});
  EXPECT_EQ(w.tensor().data, nullptr);
  small_step(plan, 64);
  const MemoryReport report = plan.report();
  ASSERT_EQ(report.programs.size(), 1u);
  const MemoryReport::Program& program = report.programs[0];
  EXPECT_EQ(program.name, "step");
  EXPECT_EQ(program.peak_bytes, 64u * 4 * 300);  // scratch is released before the logits
  EXPECT_EQ(program.at_peak[static_cast<int>(MemoryClass::kActivations)], 64u * 400);
  EXPECT_EQ(program.at_peak[static_cast<int>(MemoryClass::kScratch)], 0u);
  EXPECT_EQ(program.at_peak[static_cast<int>(MemoryClass::kLogits)], 64u * 800);
  size_t sum = 0;
  for (const size_t bytes : program.at_peak) sum += bytes;
  EXPECT_EQ(sum, program.peak_bytes);
  EXPECT_GE(program.pool_bytes, program.peak_bytes);
  EXPECT_EQ(report.pool_bytes, program.pool_bytes);
  EXPECT_EQ(report.total_bytes(), (size_t{1} << 42) + report.pool_bytes);
}

TEST(Memory, ReplayUsesOnePoolAtTheSameAddresses) {
  Memory plan(Backend::kPlan);
  small_step(plan, 64);
  Memory memory(Backend::kCpu);
  memory.adopt_plan(plan);
  std::vector<void*> first;
  for (int run = 0; run < 3; ++run) {
    ProgramScope scope(memory, "step");
    const Buffer saved = memory.allocate(MemoryClass::kActivations, "saved", kF32, {64, 100});
    Buffer scratch = memory.allocate(MemoryClass::kScratch, "scratch", kF32, {64, 50});
    std::memset(saved.tensor().data, 1, saved.tensor().bytes());
    std::memset(scratch.tensor().data, 2, scratch.tensor().bytes());
    const std::vector<void*> now = {saved.tensor().data, scratch.tensor().data};
    if (run == 0) first = now;
    EXPECT_EQ(now, first);
    scratch.release();
    const Buffer logits = memory.allocate(MemoryClass::kLogits, "logits", kF32, {64, 200});
    std::memset(logits.tensor().data, 3, logits.tensor().bytes());
    EXPECT_TRUE(holds(saved, 1));
    EXPECT_TRUE(holds(logits, 3));
  }
  EXPECT_EQ(memory.report().pool_bytes, plan.report().pool_bytes);
}

TEST(Memory, AProgramThatDeviatesFromItsPlanIsAnError) {
  Memory plan(Backend::kPlan);
  small_step(plan, 64);
  Memory memory(Backend::kCpu);
  memory.adopt_plan(plan);
  EXPECT_THROW(small_step(memory, 65), Error);  // another size
  {
    ProgramScope scope(memory, "step");  // one buffer too many
    const Buffer a = memory.allocate(MemoryClass::kActivations, "saved", kF32, {64, 100});
    Buffer b = memory.allocate(MemoryClass::kScratch, "scratch", kF32, {64, 50});
    b.release();
    const Buffer c = memory.allocate(MemoryClass::kLogits, "logits", kF32, {64, 200});
    EXPECT_THROW(memory.allocate(MemoryClass::kScratch, "more", kF32, {1}), Error);
  }
  small_step(memory, 64);  // the right one still runs
  EXPECT_THROW(memory.adopt_plan(plan), Error);
}

// Holding a planned buffer longer than the plan did would let a later one overwrite it.
TEST(Memory, ABufferThatOutlivesItsPlannedLifeIsAnError) {
  Memory plan(Backend::kPlan);
  small_step(plan, 64);
  Memory memory(Backend::kCpu);
  memory.adopt_plan(plan);
  ProgramScope scope(memory, "step");
  const Buffer saved = memory.allocate(MemoryClass::kActivations, "saved", kF32, {64, 100});
  const Buffer scratch = memory.allocate(MemoryClass::kScratch, "scratch", kF32, {64, 50});
  EXPECT_THROW(memory.allocate(MemoryClass::kLogits, "logits", kF32, {64, 200}), Error);
}

TEST(Memory, WithoutAPlanEachBufferHasItsOwnMemory) {
  Memory memory(Backend::kCpu);
  ProgramScope scope(memory, "test");
  const Buffer a = memory.allocate(MemoryClass::kScratch, "a", kF32, {16});
  const Buffer b = memory.allocate(MemoryClass::kScratch, "b", kF32, {16});
  EXPECT_NE(a.tensor().data, b.tensor().data);
  EXPECT_EQ(memory.report().total_bytes(), 0u);  // step buffers are not persistent
  EXPECT_THROW(memory.begin("inner"), Error);
}

// Allocates and releases at random, in the same way for every memory; `visit` is told each change.
using Visit = std::function<void(int, const Tensor&, bool)>;
void random_program(Memory& memory, uint64_t seed, const Visit& visit) {
  const Philox random(seed, RandomPurpose::kTest, "program");
  ProgramScope scope(memory, "random");
  uint64_t draws = 0;
  const auto below = [&](size_t bound) {
    return static_cast<int64_t>(random.uniform(draws++) * static_cast<double>(bound));
  };
  std::map<int, Buffer> live;
  for (int i = 0; i < 200; ++i) {
    if (live.empty() || below(100) < 55) {
      Buffer buffer = memory.allocate(MemoryClass::kScratch, "buffer", kF32, {1 + below(5000)});
      visit(i, buffer.tensor(), true);
      live.emplace(i, std::move(buffer));
    } else {
      const auto it = std::next(live.begin(), below(live.size()));
      visit(it->first, it->second.tensor(), false);
      live.erase(it);
    }
  }
}

TEST(Memory, PlacementNeverOverlapsLiveBuffers) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Memory plan(Backend::kPlan);
    random_program(plan, seed, [](int, const Tensor&, bool) {});
    Memory memory(Backend::kCpu);
    memory.adopt_plan(plan);
    std::map<int, std::pair<std::byte*, std::byte*>> live;
    random_program(memory, seed, [&](int id, const Tensor& t, bool begins) {
      if (!begins) {
        live.erase(id);
        return;
      }
      auto* begin = static_cast<std::byte*>(t.data);
      auto* end = begin + t.bytes();
      std::memset(begin, 0, t.bytes());  // inside the pool, or the sanitizer stops here
      for (const auto& [other, range] : live) {
        ASSERT_TRUE(end <= range.first || range.second <= begin)
            << "seed " << seed << ": buffers " << id << " and " << other;
      }
      live[id] = {begin, end};
    });
    const MemoryReport::Program program = plan.report().programs.at(0);
    EXPECT_LE(program.pool_bytes, program.peak_bytes * 3 / 2) << "seed " << seed;
  }
}

// Memory's rule, for each pair of slots: slower than place(), and plainly right.
void place_by_pairs(Program& program) {
  std::vector<Slot*> order;
  for (Slot& slot : program.slots) order.push_back(&slot);
  std::stable_sort(order.begin(), order.end(),
                   [](const Slot* a, const Slot* b) { return a->bytes > b->bytes; });
  const auto share = [](const Slot& a, const Slot& b) {
    const Slot& first = a.begin < b.begin ? a : b;
    const Slot& second = a.begin < b.begin ? b : a;
    return first.end < second.begin &&
           std::all_of(first.released.begin(), first.released.end(),
                       [&](const StreamMark& mark) { return covers(second.known, mark); });
  };
  for (size_t n = 0; n < order.size(); ++n) {
    std::vector<std::pair<size_t, size_t>> busy;
    for (size_t i = 0; i < n; ++i) {
      if (share(*order[i], *order[n])) continue;
      busy.emplace_back(order[i]->offset, order[i]->offset + aligned(order[i]->bytes));
    }
    std::sort(busy.begin(), busy.end());
    size_t offset = 0;
    for (const auto& [begin, end] : busy) {
      if (offset + aligned(order[n]->bytes) <= begin) break;
      offset = std::max(offset, end);
    }
    order[n]->offset = offset;
    program.pool_bytes = std::max(program.pool_bytes, offset + aligned(order[n]->bytes));
  }
}

// Thousands of slots, of which some live for a pair of moments of a step's two passes, as what a
// layer saves, and others briefly; every tenth is used by a second stream, without or with an
// event.
Program large_program(uint64_t seed) {
  const Philox random(seed, RandomPurpose::kTest, "slots");
  constexpr int64_t kMoments = 6000;
  Program program;
  program.moments = 4 * kMoments;
  for (int64_t n = 0; n < 1500; ++n) {
    const auto draw = [&](int64_t i, int64_t below) {
      return static_cast<int64_t>(random.uniform(8 * n + i) * static_cast<double>(below));
    };
    Slot slot;
    slot.bytes = static_cast<size_t>(n % 3 == 0 ? 4096 : draw(0, 100000));
    slot.begin = 4 * (n % 3 == 0 ? n : draw(1, kMoments)) + draw(7, 2);
    slot.end = n % 3 == 0 ? 4 * kMoments - slot.begin : slot.begin + 2 + draw(2, 200);
    slot.users = {n % 10 == 0 ? 1 : 0};
    slot.known = {slot.begin, slot.begin};
    if (n % 20 == 0) slot.users.push_back(0);
    for (const int user : slot.users) slot.released.push_back({user, slot.end});
    if (n % 10 == 5) slot.known = {slot.begin, draw(3, slot.begin + 1)};
    if (n % 10 == 0) slot.known = {draw(4, slot.begin + 1), slot.begin};
    program.slots.push_back(slot);
  }
  return program;
}

TEST(Memory, ManySlotsArePlacedAsPairByPair) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    Program fast = large_program(seed);
    Program slow = fast;
    place(fast);
    place_by_pairs(slow);
    EXPECT_EQ(fast.pool_bytes, slow.pool_bytes);
    for (size_t i = 0; i < fast.slots.size(); ++i) {
      ASSERT_EQ(fast.slots[i].offset, slow.slots[i].offset) << "seed " << seed << ", slot " << i;
    }
  }
}

// ---- Poison -----------------------------------------------------------------------------------

TEST(Memory, PoisonMakesUseAfterReleaseVisibleWithAPlan) {
  Memory plan(Backend::kPlan);
  small_step(plan, 64);
  Memory memory(Backend::kCpu);
  memory.poison();
  memory.adopt_plan(plan);
  small_step(memory, 64);
  const ProgramScope scope(memory, "step");
  const Buffer saved = memory.allocate(MemoryClass::kActivations, "saved", kF32, {64, 100});
  EXPECT_TRUE(std::isnan(saved.tensor().f32()[17]));  // never written
  Buffer scratch = memory.allocate(MemoryClass::kScratch, "scratch", kF32, {64, 50});
  const Tensor stale = scratch;
  std::memset(stale.data, 2, stale.bytes());
  scratch.release();
  EXPECT_TRUE(std::isnan(stale.f32()[0]));
  EXPECT_TRUE(std::isnan(stale.f32()[64 * 50 - 1]));
  stale.f32()[5] = 1.0f;
  EXPECT_THROW(memory.allocate(MemoryClass::kLogits, "logits", kF32, {64, 200}), Error);
}

TEST(Memory, PoisonMakesUseAfterReleaseVisibleWithoutAPlan) {
  Memory memory(Backend::kCpu);
  memory.poison();
  Buffer buffer = memory.allocate(MemoryClass::kActivations, "buffer", kF32, {100});
  const Tensor stale = buffer;
  EXPECT_TRUE(std::isnan(stale.f32()[99]));
  std::memset(stale.data, 0, stale.bytes());
  buffer.release();
  EXPECT_TRUE(std::isnan(stale.f32()[0]));
  buffer = memory.allocate(MemoryClass::kActivations, "next", kF32, {100});
  EXPECT_EQ(buffer.tensor().data, stale.data);
  buffer.release();
  stale.f32()[99] = 0;
  EXPECT_THROW(memory.allocate(MemoryClass::kActivations, "after", kF32, {100}), Error);
}

TEST(Memory, OnePoolServesAllPrograms) {
  Memory plan(Backend::kPlan);
  small_step(plan, 64);
  {
    ProgramScope scope(plan, "validation");
    const Buffer b = plan.allocate(MemoryClass::kLogits, "logits", kF32, {1000000});
  }
  const MemoryReport report = plan.report();
  ASSERT_EQ(report.programs.size(), 2u);
  EXPECT_EQ(report.pool_bytes,
            std::max(report.programs[0].pool_bytes, report.programs[1].pool_bytes));
}

// Counts what it gives out, on the heap.
struct CountingAllocator {
  std::shared_ptr<void> operator()(size_t bytes) const {
    ++*live;
    return {std::malloc(bytes), [live = live](void* data) {
              std::free(data);
              --*live;
            }};
  }
  std::shared_ptr<int> live = std::make_shared<int>(0);
};

TEST(CollectiveMemory, HoldsThePoolAndLargeWeights) {
  constexpr int64_t kLarge = int64_t{1} << 20;
  const auto step = [](Memory& memory) {
    const ProgramScope scope(memory, "step");
    memory.allocate(MemoryClass::kActivations, "x", DType::kF32, {3 * kLarge}).release();
  };
  const CountingAllocator allocator;
  {
    Memory plan = Memory::planning(Backend::kCpu);
    step(plan);
    Memory memory(Backend::kCpu);
    memory.set_collective_allocator(allocator);
    memory.adopt_plan(plan);
    const Buffer weights = memory.allocate(MemoryClass::kWeights, "w", DType::kF32, {kLarge});
    const Buffer small = memory.allocate(MemoryClass::kWeights, "b", DType::kF32, {16});
    const Buffer moment = memory.allocate(MemoryClass::kOptimizer, "m", DType::kF32, {kLarge});
    EXPECT_EQ(*allocator.live, 2);
    const std::vector<Tensor> regions = memory.collective_regions();
    ASSERT_EQ(regions.size(), 2U);
    EXPECT_GE(regions[0].bytes(), 12U << 20);
    EXPECT_EQ(regions[1].data, weights.tensor().data);
    step(memory);
    EXPECT_THROW(memory.set_collective_allocator(allocator), Error);
    // The destructors of buffers give their memory back, that of Memory the pool.
  }
  EXPECT_EQ(*allocator.live, 0);
}

}  // namespace
}  // namespace sbtrain
