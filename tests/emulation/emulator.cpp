#include "emulation/emulator.h"

#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <deque>
#include <exception>
#include <memory>
#include <utility>

namespace sbtrain::emulation {
namespace {

constexpr size_t kStackBytes = size_t{128} << 10;
constexpr int kMaxThreads = 1024;
constexpr int kLanes = 32;
constexpr int kBarriers = 16;

using Action = std::function<void()>;

// Where a stack continues. The compiler's own jumps neither call the library nor look for handlers
// of threads that end, which took a fifth of the tests' time; __builtin_longjmp() must not stand in
// the function whose place it is.
using Place = std::array<void*, 5>;
[[noreturn, gnu::noinline]] void jump(Place& place) {
  __builtin_longjmp(place.data(), 1);
}

// What a fiber runs on, and where it continues. The blocks use the stacks one after the other: one
// whose kernel has ended is idle until the next block's, since to make a context takes longer than
// many a kernel's wait.
struct Stack {
  ucontext_t begin;  // where it is entered
  Place place{};     // where it continues, once it has been entered
  bool entered = false, idle = false;
};

struct Fiber {
  Stack* stack = nullptr;
  Index thread;
  int lane = 0, warp = 0;
  bool done = false;
  // What it waits for: a count, which almost all waits are for, or anything. Without both it can
  // run.
  const uint64_t* count = nullptr;
  uint64_t wanted = 0;
  std::function<bool()> ready;
  const char* what = "";
  int64_t detail = 0;
  // How many exchanges of its warp, and how many barriers of each id, it has reached.
  uint64_t exchanges = 0;
  std::array<uint64_t, kBarriers> barriers{};

  bool waits() const { return count != nullptr ? *count < wanted : ready && !ready(); }
};

// Two exchanges may be under way: a lane may reach the next one before another has read this one.
struct Warp {
  std::array<uint64_t, 2> arrived{};
  std::array<ThreeOfLanes, 2> values{};
  std::vector<Action> issued;
  std::deque<std::vector<Action>> groups;
};

struct Barrier {
  uint64_t arrived = 0;
  std::array<bool, 2> all{};
};

class Block {
 public:
  Block(Index grid, Index index, Index size, Timing timing, const Action& kernel)
      : grid_(grid), index_(index), size_(size), timing_(timing), kernel_(kernel) {
    const int threads = static_cast<int>(size.x * size.y * size.z);
    if (threads > kMaxThreads) throw KernelError("a block of more than 1024 threads");
    fibers_.resize(static_cast<size_t>(threads));
    warps_.resize((fibers_.size() + kLanes - 1) / kLanes);
  }
  void run();

  Fiber& current() { return *current_; }
  Warp& warp() { return warps_[static_cast<size_t>(current_->warp)]; }
  const Index& grid() const { return grid_; }
  const Index& index() const { return index_; }
  const Index& size() const { return size_; }
  bool late() const { return timing_ == Timing::kLate; }
  void wait_until(const char* what, int64_t detail, std::function<bool()> ready);
  void wait_for_count(const char* what, int64_t detail, const uint64_t& count, uint64_t wanted);
  bool barrier(int id, int threads, bool x);
  void issue_copy(Action copy);

 private:
  static void enter();
  void start(Fiber& fiber, unsigned thread);
  Fiber* next_of_warp();
  [[noreturn]] void enter_or_continue(Fiber& fiber);
  void resume(Fiber& fiber);
  void suspend(const char* what, int64_t detail);
  bool run_warp(size_t warp);
  bool copy_one();
  [[noreturn]] void fail_deadlock() const;

  const Index grid_, index_, size_;
  const Timing timing_;
  const Action& kernel_;
  std::vector<Fiber> fibers_;
  std::vector<Warp> warps_;
  std::array<Barrier, kBarriers> barriers_;
  std::deque<Action> copies_;
  Fiber* current_ = nullptr;
  Fiber *next_ = nullptr, *end_ = nullptr;  // of the lanes of the warp whose turn it is
  Place scheduler_{};
  size_t running_ = 0;
  std::exception_ptr error_;
};

// The block whose fibers run. Kernels, like those on a GPU, are given no handle of what runs them.
Block* running_block = nullptr;

std::array<Stack, kMaxThreads> stacks;  // by thread

// Pages that no fiber touches take no memory.
char* memory_of(unsigned thread) {
  static const std::unique_ptr<char[]> memory(new char[kStackBytes * kMaxThreads]);
  return memory.get() + kStackBytes * thread;
}

// Runs the kernels of one block after the other.
void Block::enter() {
  for (;;) {
    Block& block = *running_block;
    try {
      block.kernel_();
    } catch (...) {
      block.error_ = std::current_exception();
    }
    Fiber& fiber = block.current();
    fiber.done = true;
    fiber.stack->idle = true;
    if (__builtin_setjmp(fiber.stack->place.data()) == 0) jump(block.scheduler_);
  }
}

void Block::start(Fiber& fiber, unsigned thread) {
  fiber.thread = {thread % size_.x, thread / size_.x % size_.y, thread / (size_.x * size_.y)};
  fiber.lane = static_cast<int>(thread % kLanes);
  fiber.warp = static_cast<int>(thread / kLanes);
  Stack& stack = stacks[thread];
  fiber.stack = &stack;
  // Others have not been entered yet, or were left in a kernel that another one's error ended.
  stack.entered = std::exchange(stack.idle, false);
  if (stack.entered) return;
  ucontext_t& begin = stack.begin;
  getcontext(&begin);
  begin.uc_stack.ss_sp = memory_of(thread);
  begin.uc_stack.ss_size = kStackBytes;
  begin.uc_link = nullptr;
  makecontext(&begin, &Block::enter, 0);
}

// The next lane of the warp whose turn it is that can run, or null.
Fiber* Block::next_of_warp() {
  while (next_ != end_) {
    Fiber& fiber = *next_++;
    if (fiber.done || fiber.waits()) continue;
    fiber.count = nullptr;
    if (fiber.ready) fiber.ready = nullptr;
    return &fiber;
  }
  return nullptr;
}

void Block::enter_or_continue(Fiber& fiber) {
  current_ = &fiber;
  Stack& stack = *fiber.stack;
  if (stack.entered) jump(stack.place);
  stack.entered = true;
  setcontext(&stack.begin);
  std::abort();  // setcontext() returns if it fails alone
}

// Runs the fiber until it ends, or waits and so do the lanes after it.
void Block::resume(Fiber& fiber) {
  if (__builtin_setjmp(scheduler_.data()) == 0) enter_or_continue(fiber);
}

// Returns whether any of its lanes could run.
bool Block::run_warp(size_t warp) {
  bool progress = false;
  next_ = fibers_.data() + warp * kLanes;
  end_ = fibers_.data() + std::min((warp + 1) * kLanes, fibers_.size());
  while (Fiber* fiber = next_of_warp()) {
    resume(*fiber);
    if (error_) std::rethrow_exception(error_);
    if (current_->done) --running_;
    progress = true;
  }
  return progress;
}

bool Block::copy_one() {
  if (copies_.empty()) return false;
  const Action copy = std::move(copies_.front());
  copies_.pop_front();
  copy();
  return true;
}

void Block::run() {
  running_block = this;
  for (unsigned i = 0; i < fibers_.size(); ++i) start(fibers_[i], i);
  running_ = fibers_.size();
  uint64_t random = 1;
  while (running_ > 0) {
    bool progress = false;
    // Each round begins with another warp, so that none is always ahead.
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    const size_t first = random >> 40;
    for (size_t i = 0; i < warps_.size(); ++i) {
      progress = run_warp((first + i) % warps_.size()) || progress;
    }
    if (!progress && !copy_one()) fail_deadlock();
  }
}

void Block::fail_deadlock() const {
  std::string text = "deadlock";
  for (size_t w = 0; w < warps_.size(); ++w) {
    // Lanes of one warp mostly wait for the same.
    std::string last;
    const size_t end = std::min((w + 1) * kLanes, fibers_.size());
    for (size_t i = w * kLanes; i < end; ++i) {
      const Fiber& fiber = fibers_[i];
      std::string mine = "ended";
      if (!fiber.done) mine = "waits for " + (fiber.what + (" " + std::to_string(fiber.detail)));
      if (mine == last) continue;
      text += (last.empty() ? "; warp " + std::to_string(w) + " "
                            : ", lane " + std::to_string(i % kLanes) + " ") +
              mine;
      last = mine;
    }
  }
  throw KernelError(text);
}

void Block::suspend(const char* what, int64_t detail) {
  Fiber& fiber = *current_;
  fiber.what = what;
  fiber.detail = detail;
  if (__builtin_setjmp(fiber.stack->place.data()) != 0) return;
  // Straight to the next lane: on the way over the scheduler every turn would cost two jumps.
  if (Fiber* next = next_of_warp()) enter_or_continue(*next);
  jump(scheduler_);
}

void Block::wait_until(const char* what, int64_t detail, std::function<bool()> ready) {
  if (ready()) return;
  current_->ready = std::move(ready);
  suspend(what, detail);
}

void Block::wait_for_count(const char* what, int64_t detail, const uint64_t& count,
                           uint64_t wanted) {
  if (count >= wanted) return;
  current_->count = &count;
  current_->wanted = wanted;
  suspend(what, detail);
}

bool Block::barrier(int id, int threads, bool x) {
  Barrier& bar = barriers_[static_cast<size_t>(id)];
  const uint64_t round = current_->barriers[static_cast<size_t>(id)]++;
  const uint64_t all = static_cast<uint64_t>(threads) * (round + 1);
  bool& result = bar.all[round % 2];
  result = x && (bar.arrived % static_cast<uint64_t>(threads) == 0 || result);
  ++bar.arrived;
  wait_for_count("barrier", id, bar.arrived, all);
  return result;
}

void Block::issue_copy(Action copy) {
  if (late()) {
    copies_.push_back(std::move(copy));
  } else {
    copy();
  }
}

}  // namespace

void run_grid(Index grid, Index block, Timing timing, const std::function<void()>& kernel) {
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) Block(grid, {x, y, z}, block, timing, kernel).run();
    }
  }
}

const Index& thread_index() {
  return running_block->current().thread;
}
const Index& block_index() {
  return running_block->index();
}
const Index& block_size() {
  return running_block->size();
}
const Index& grid_size() {
  return running_block->grid();
}
int lane_index() {
  return running_block->current().lane;
}

void wait_until(const char* what, int64_t detail, std::function<bool()> ready) {
  running_block->wait_until(what, detail, std::move(ready));
}

namespace {

// The last of a warp's lanes to come calls `complete`, before any of them goes on.
template <size_t kCount, typename Complete>
const ThreeOfLanes& exchange(const std::array<uint64_t, kCount>& values, const Complete& complete) {
  Fiber& fiber = running_block->current();
  Warp& warp = running_block->warp();
  const size_t side = fiber.exchanges % 2;
  const uint64_t all = kLanes * (fiber.exchanges / 2 + 1);
  ++fiber.exchanges;
  ThreeOfLanes& of_all = warp.values[side];
  for (size_t i = 0; i < kCount; ++i) of_all[i][static_cast<size_t>(fiber.lane)] = values[i];
  uint64_t& arrived = warp.arrived[side];
  if (++arrived == all) complete(warp);
  running_block->wait_for_count("the other lanes; its exchange",
                                static_cast<int64_t>(fiber.exchanges), arrived, all);
  return of_all;
}

template <typename Complete>
void together(const Complete& complete) {
  exchange(std::array<uint64_t, 0>{}, complete);
}

}  // namespace

const uint64_t* exchange(uint64_t value) {
  return exchange(std::array{value}, [](Warp&) {})[0].data();
}

const ThreeOfLanes& exchange(uint64_t x, uint64_t y, uint64_t z) {
  return exchange(std::array{x, y, z}, [](Warp&) {});
}

bool barrier(int id, int threads, bool x) {
  return running_block->barrier(id, threads, x);
}

void issue_copy(std::function<void()> copy) {
  running_block->issue_copy(std::move(copy));
}

void issue_product(std::function<void()> product) {
  running_block->warp().issued.push_back(std::move(product));
}

void commit_products() {
  together([](Warp& warp) {
    warp.groups.push_back(std::move(warp.issued));
    warp.issued.clear();
    if (!running_block->late()) {
      for (const Action& product : warp.groups.back()) product();
      warp.groups.back().clear();
    }
  });
}

void wait_for_products(int pending) {
  together([pending](Warp& warp) {
    while (warp.groups.size() > static_cast<size_t>(pending)) {
      for (const Action& product : warp.groups.front()) product();
      warp.groups.pop_front();
    }
  });
}

}  // namespace sbtrain::emulation
