#include "support/communicator_suite.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/error.h"
#include "core/philox.h"
#include "ops/memory.h"

namespace sbtrain::test {
namespace {

constexpr DType kSummed[] = {DType::kF32, DType::kBF16, DType::kF64, DType::kI32, DType::kI64};
constexpr DType kMoved[] = {DType::kF32, DType::kBF16, DType::kF64,
                            DType::kI32, DType::kI64,  DType::kU8};
// Of a shard: none, one, an odd number, and, for one type, more than one message of any library.
std::vector<int64_t> sizes(DType dtype) {
  std::vector<int64_t> all = {0, 1, 1001};
  if (dtype == DType::kF32) all.push_back(400003);
  return all;
}

// A tensor on the stream's device, and its contents on the host.
class Device {
 public:
  Device(Stream& s, DType dtype, int64_t elements)
      : s_(s), buffer_(s.allocate(MemoryClass::kActivations, "test", dtype, {elements})) {}
  operator const Tensor&() const { return buffer_; }  // NOLINT: used as its tensor
  Tensor part(int64_t begin, int64_t count) const {
    return buffer_.tensor().row_range(begin, count);
  }
  void write(const std::vector<uint8_t>& bytes) {
    ops::run(s_, ops::CopyFromHost{.y = buffer_, .host = bytes.data()});
  }
  std::vector<uint8_t> read() const {
    std::vector<uint8_t> bytes(buffer_.tensor().bytes());
    ops::run(s_, ops::CopyToHost{.host = bytes.data(), .x = buffer_});
    return bytes;
  }

 private:
  Stream& s_;
  Buffer buffer_;
};

// Small integers, whose sums every type holds exactly, as elements of `dtype`.
template <typename Value>
std::vector<uint8_t> encode(DType dtype, int64_t count, Value value) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count) * dtype_size(dtype));
  const auto put = [&](int64_t i, const auto& x) {
    std::memcpy(bytes.data() + static_cast<size_t>(i) * sizeof(x), &x, sizeof(x));
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t v = value(i);
    switch (dtype) {
      case DType::kF32:
        put(i, static_cast<float>(v));
        break;
      case DType::kBF16:
        put(i, static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(v)) >> 16));
        break;
      case DType::kF64:
        put(i, static_cast<double>(v));
        break;
      case DType::kI32:
        put(i, static_cast<int32_t>(v));
        break;
      case DType::kI64:
        put(i, v);
        break;
      case DType::kU8:
      case DType::kE4M3:
      case DType::kE5M2:
        put(i, static_cast<uint8_t>(v));
        break;
    }
  }
  return bytes;
}

int64_t term(int64_t i, int rank) {
  return (i + 3 * rank) % 4 - 1;
}
int64_t sum(int64_t i, int world) {
  int64_t total = 0;
  for (int r = 0; r < world; ++r) total += term(i, r);
  return total;
}

std::string trace(DType dtype, int64_t n) {
  return fmt::format("{} of {}", n, dtype_name(dtype));
}

void all_gather_moves_every_type(Communicator& ranks, Stream& s) {
  const int W = ranks.world();
  for (const DType dtype : kMoved) {
    for (const int64_t n : sizes(dtype)) {
      SCOPED_TRACE(trace(dtype, n));
      const auto expected = encode(dtype, W * n, [&](int64_t i) { return i % 101; });
      const auto mine = encode(dtype, n, [&](int64_t i) { return (i + ranks.rank() * n) % 101; });
      Device shard(s, dtype, n);
      Device full(s, dtype, W * n);
      shard.write(mine);
      ranks.all_gather(s, full, shard);
      EXPECT_TRUE(full.read() == expected);
      EXPECT_TRUE(shard.read() == mine);
      // In place.
      Device other(s, dtype, W * n);
      other.write(encode(dtype, W * n, [&](int64_t i) {
        return i / std::max<int64_t>(n, 1) == ranks.rank() ? i % 101 : 7;
      }));
      ranks.all_gather(s, other, other.part(ranks.rank() * n, n));
      EXPECT_TRUE(other.read() == expected);
    }
  }
}

void reduce_scatter_sums_every_type(Communicator& ranks, Stream& s) {
  const int W = ranks.world();
  for (const DType dtype : kSummed) {
    for (const int64_t n : sizes(dtype)) {
      SCOPED_TRACE(trace(dtype, n));
      const int64_t begin = ranks.rank() * n;
      const auto mine = encode(dtype, W * n, [&](int64_t i) { return term(i, ranks.rank()); });
      const auto expected = encode(dtype, n, [&](int64_t i) { return sum(begin + i, W); });
      Device shard(s, dtype, n);
      Device full(s, dtype, W * n);
      full.write(mine);
      ranks.reduce_scatter(s, shard, full);
      EXPECT_TRUE(shard.read() == expected);
      // In place.
      full.write(mine);
      ranks.reduce_scatter(s, full.part(begin, n), full);
      const auto whole = full.read();
      const auto bytes = static_cast<ptrdiff_t>(dtype_size(dtype));
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), whole.begin() + begin * bytes));
    }
  }
}

void all_to_all_moves_every_type(Communicator& ranks, Stream& s) {
  const int W = ranks.world();
  for (const DType dtype : kMoved) {
    for (const int64_t n : sizes(dtype)) {
      SCOPED_TRACE(trace(dtype, n));
      // Element i of what rank `from` sends to rank `to`.
      const auto value = [](int from, int to, int64_t i) { return (5 * from + 3 * to + i) % 101; };
      const auto mine = encode(dtype, W * n, [&](int64_t i) {
        return value(ranks.rank(), static_cast<int>(i / n), i % n);
      });
      const auto expected = encode(dtype, W * n, [&](int64_t i) {
        return value(static_cast<int>(i / n), ranks.rank(), i % n);
      });
      Device to(s, dtype, W * n);
      Device from(s, dtype, W * n);
      from.write(mine);
      ranks.all_to_all(s, to, from);
      // The place of this rank's own part is undefined.
      const auto got = to.read();
      const size_t part = expected.size() / static_cast<size_t>(W);
      for (int r = 0; r < W; ++r) {
        const auto at = static_cast<ptrdiff_t>(part) * r;
        const auto size = static_cast<ptrdiff_t>(part);
        EXPECT_TRUE(r == ranks.rank() ||
                    std::equal(got.begin() + at, got.begin() + at + size, expected.begin() + at));
      }
      EXPECT_TRUE(from.read() == mine);
    }
  }
}

void shift_moves_every_type(Communicator& ranks, Stream& s) {
  const int W = ranks.world();
  for (const int step : {1, -1, 2, 0, W, 1 - 2 * W}) {
    for (const DType dtype : kMoved) {
      for (const int64_t n : sizes(dtype)) {
        SCOPED_TRACE(trace(dtype, n));
        SCOPED_TRACE(step);
        const auto of_rank = [&](int r) {
          return encode(dtype, n, [&](int64_t i) { return (7 * r + i) % 101; });
        };
        const int source = ((ranks.rank() - step) % W + W) % W;
        Device to(s, dtype, n);
        Device from(s, dtype, n);
        from.write(of_rank(ranks.rank()));
        ranks.shift(s, to, from, step);
        EXPECT_TRUE(to.read() == of_rank(source));
        EXPECT_TRUE(from.read() == of_rank(ranks.rank()));
      }
    }
  }
}

void all_reduce_sums_every_type(Communicator& ranks, Stream& s) {
  for (const DType dtype : kSummed) {
    for (const int64_t n : sizes(dtype)) {
      SCOPED_TRACE(trace(dtype, n));
      Device x(s, dtype, n);
      x.write(encode(dtype, n, [&](int64_t i) { return term(i, ranks.rank()); }));
      ranks.all_reduce(s, x);
      EXPECT_TRUE(x.read() == encode(dtype, n, [&](int64_t i) { return sum(i, ranks.world()); }));
    }
  }
}

std::vector<float> random(const std::string& name, int64_t n) {
  const Philox philox(1, RandomPurpose::kTest, name);
  std::vector<float> values(static_cast<size_t>(n));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(philox.normal(i));
  return values;
}

// Sums that round differently in every order: within the bound of any order, with the same bits on
// every rank and every time.
void sums_have_one_order(Communicator& ranks, Stream& s) {
  constexpr int64_t kElements = 100003;
  const int W = ranks.world();
  std::vector<double> exact(kElements);
  std::vector<double> magnitude(kElements);
  for (int r = 0; r < W; ++r) {
    const std::vector<float> x = random(fmt::format("rank {}", r), kElements);
    for (int64_t i = 0; i < kElements; ++i) {
      exact[i] += static_cast<double>(x[i]);
      magnitude[i] += std::abs(static_cast<double>(x[i]));
    }
  }
  const std::vector<float> mine = random(fmt::format("rank {}", ranks.rank()), kElements);
  std::vector<uint8_t> bytes(kElements * sizeof(float));
  std::memcpy(bytes.data(), mine.data(), bytes.size());
  std::vector<uint8_t> first;
  for (int repeat = 0; repeat < 5; ++repeat) {
    Device x(s, DType::kF32, kElements);
    x.write(bytes);
    ranks.all_reduce(s, x);
    const std::vector<uint8_t> result = x.read();
    if (repeat == 0) first = result;
    EXPECT_TRUE(result == first);
  }
  std::vector<float> result(kElements);
  std::memcpy(result.data(), first.data(), first.size());
  constexpr double kRounding = 6e-8;  // of f32
  for (int64_t i = 0; i < kElements; ++i) {
    ASSERT_LE(std::abs(static_cast<double>(result[i]) - exact[i]), W * kRounding * magnitude[i]);
  }
  const std::string text(first.begin(), first.end());
  const auto hash = std::to_string(std::hash<std::string>()(text));
  EXPECT_EQ(ranks.all_gather(hash), std::vector<std::string>(static_cast<size_t>(W), hash));
}

void broadcast_from_every_root(Communicator& ranks, Stream& s) {
  for (const DType dtype : kMoved) {
    for (int root = 0; root < ranks.world(); ++root) {
      SCOPED_TRACE(root);
      const int64_t n = sizes(dtype).back();
      Device x(s, dtype, n);
      x.write(encode(dtype, n, [&](int64_t i) { return (i + ranks.rank()) % 101; }));
      ranks.broadcast(s, x, root);
      EXPECT_TRUE(x.read() == encode(dtype, n, [&](int64_t i) { return (i + root) % 101; }));
    }
  }
}

void host_values_travel(Communicator& ranks, Stream&) {
  const int W = ranks.world();
  std::vector<double> values = {0.1, static_cast<double>(ranks.rank()), -1e300};
  ranks.sum(values);
  double tenths = 0;
  for (int r = 0; r < W; ++r) tenths += 0.1;
  EXPECT_EQ(values, (std::vector<double>{tenths, W * (W - 1) / 2.0, -1e300 * W}));
  ranks.sum({});

  using namespace std::string_literals;
  const std::string text = "two lines\nand a \0 byte\xff"s;
  std::vector<std::string> expected;
  for (int r = 0; r < W; ++r) expected.push_back(text + std::to_string(r));
  EXPECT_EQ(ranks.all_gather(text + std::to_string(ranks.rank())), expected);
  for (int root = 0; root < W; ++root) {
    EXPECT_EQ(ranks.broadcast(text + std::to_string(ranks.rank()), root), expected[root]);
  }
  EXPECT_EQ(ranks.all_gather(""), std::vector<std::string>(static_cast<size_t>(W)));
  ranks.barrier();
}

// Gathers the members' ranks in `parent`.
std::vector<int64_t> members(Communicator& group, Communicator& parent, Stream& s) {
  Device shard(s, DType::kI64, 1);
  Device full(s, DType::kI64, group.world());
  shard.write(encode(DType::kI64, 1, [&](int64_t) { return parent.rank(); }));
  group.all_gather(s, full, shard);
  const std::vector<uint8_t> bytes = full.read();
  std::vector<int64_t> ranks(static_cast<size_t>(group.world()));
  std::memcpy(ranks.data(), bytes.data(), bytes.size());
  return ranks;
}

void check_group(Communicator& ranks, Stream& s, const Communicator::ColorOf& color_of) {
  std::vector<int64_t> expected;
  for (int r = 0; r < ranks.world(); ++r) {
    if (color_of(r) == color_of(ranks.rank())) expected.push_back(r);
  }
  const auto group = ranks.split(color_of);
  EXPECT_EQ(group->world(), static_cast<int>(expected.size()));
  EXPECT_EQ(expected.at(group->rank()), ranks.rank());
  EXPECT_EQ(members(*group, ranks, s), expected);
  std::vector<double> count = {1};
  group->sum(count);
  EXPECT_EQ(count[0], static_cast<double>(expected.size()));
  // The parent between two collectives of its group.
  std::vector<int64_t> all(static_cast<size_t>(ranks.world()));
  std::iota(all.begin(), all.end(), 0);
  EXPECT_EQ(members(ranks, ranks, s), all);
  EXPECT_EQ(members(*group, ranks, s), expected);
}

void groups_are_apart(Communicator& ranks, Stream& s) {
  check_group(ranks, s, [](int rank) { return rank % 2; });
  check_group(ranks, s, [](int rank) { return rank / 2 - 5; });  // colors may be negative
  check_group(ranks, s, [](int) { return 1; });
  check_group(ranks, s, [](int rank) { return -rank; });
  const auto half = ranks.split([](int rank) { return rank % 2; });
  check_group(*half, s, [](int rank) { return rank % 2; });
}

void unfit_arguments_are_refused(Communicator& ranks, Stream& s) {
  Device x(s, DType::kU8, 4);
  Device y(s, DType::kF32, 4 * ranks.world() + 1);
  EXPECT_THROW(ranks.all_reduce(s, x), Error);
  EXPECT_THROW(ranks.broadcast(s, x, ranks.world()), Error);
  EXPECT_THROW(ranks.broadcast("text", -1), Error);
  EXPECT_THROW(ranks.all_gather(s, y, y.part(0, 4)), Error);
  EXPECT_THROW(ranks.reduce_scatter(s, y.part(0, 4), y), Error);
  ranks.barrier();
}

void registered_memory_changes_nothing(Communicator& ranks, Stream& s) {
  constexpr int64_t kElements = 5000;
  const int W = ranks.world();
  Device full(s, DType::kI32, kElements * W);
  const std::shared_ptr<void> handle = ranks.register_memory(full);
  for (int repeat = 0; repeat < 3; ++repeat) {
    full.write(
        encode(DType::kI32, kElements * W, [&](int64_t i) { return term(i, ranks.rank()); }));
    const Tensor shard = full.part(kElements * ranks.rank(), kElements);
    ranks.reduce_scatter(s, shard, full);
    ranks.all_gather(s, full, shard);
    EXPECT_TRUE(full.read() ==
                encode(DType::kI32, kElements * W, [&](int64_t i) { return sum(i, W); }));
  }
}

// More elements than 32 bits count. All of the first and the last rows are compared, of the whole
// the sums would take the host too long.
void counts_have_64_bits(Communicator& ranks, Stream& s) {
  const int W = ranks.world();
  const int64_t n = (int64_t{1} << 31) / W + 4097;
  Buffer full = s.allocate(MemoryClass::kActivations, "full", DType::kBF16, {n * W});
  Buffer shard = s.allocate(MemoryClass::kActivations, "shard", DType::kBF16, {n});
  ops::run(s, ops::Fill{.x = full, .value = static_cast<float>(ranks.rank() + 1)});
  ranks.reduce_scatter(s, shard, full);
  ops::run(s, ops::Fill{.x = full, .value = -1.0f});
  ranks.all_gather(s, full, shard);
  const auto expected = encode(DType::kBF16, 4096, [&](int64_t) { return W * (W + 1) / 2; });
  for (const int64_t begin : {int64_t{0}, n - 4096, n, n * W - 4096}) {
    std::vector<uint8_t> bytes(expected.size());
    ops::run(s, ops::CopyToHost{.host = bytes.data(), .x = full.tensor().row_range(begin, 4096)});
    EXPECT_TRUE(bytes == expected) << begin;
  }
}

// Where ranks compare their calls (parallel/mpi.h), all of them throw.
void different_calls_throw_everywhere(Communicator& ranks, Stream& s) {
  if (ranks.world() == 1) return;
  const auto throws = [](const std::function<void()>& call) {
    try {
      call();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ExitCode::kInternal) << e.what();
    }
  };
  const bool different = ranks.rank() == ranks.world() - 1;
  Device x(s, DType::kI32, different ? 5 : 4);
  throws([&] { ranks.all_reduce(s, x); });
}

}  // namespace

const std::vector<CommunicatorCheck>& communicator_checks() {
  static const std::vector<CommunicatorCheck> checks = {
      {"AllGatherMovesEveryType", all_gather_moves_every_type},
      {"ReduceScatterSumsEveryType", reduce_scatter_sums_every_type},
      {"AllToAllMovesEveryType", all_to_all_moves_every_type},
      {"ShiftMovesEveryType", shift_moves_every_type},
      {"AllReduceSumsEveryType", all_reduce_sums_every_type},
      {"SumsHaveOneOrder", sums_have_one_order},
      {"BroadcastFromEveryRoot", broadcast_from_every_root},
      {"HostValuesTravel", host_values_travel},
      {"GroupsAreApart", groups_are_apart},
      {"UnfitArgumentsAreRefused", unfit_arguments_are_refused},
      {"RegisteredMemoryChangesNothing", registered_memory_changes_nothing},
      {.name = "CountsHave64Bits", .run = counts_have_64_bits, .large = true},
      {.name = "DifferentCallsThrowEverywhere",
       .run = different_calls_throw_everywhere,
       .misuse = true},
  };
  return checks;
}

}  // namespace sbtrain::test
