// Properties of every communicator, tested on that of a single process.
#include "parallel/communicator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "core/error.h"

namespace sbtrain {
namespace {

constexpr int64_t kElements = 100;

// A buffer of bytes that start at `first` and count up.
class Bytes {
 public:
  Bytes(DType dtype, uint8_t first) : bytes_(kElements * dtype_size(dtype)), dtype_(dtype) {
    std::iota(bytes_.begin(), bytes_.end(), first);
  }
  Tensor tensor(int64_t elements = kElements) { return Tensor(bytes_.data(), dtype_, {elements}); }
  bool operator==(const Bytes& other) const { return bytes_ == other.bytes_; }

 private:
  std::vector<uint8_t> bytes_;
  DType dtype_;
};

class SingleProcess : public testing::Test {
 protected:
  Memory memory{Backend::kCpu};
  Stream stream{memory, "communication", StreamPriority::kHigh};
  std::unique_ptr<Communicator> ranks = make_single_process();
};

constexpr DType kSummed[] = {DType::kF32, DType::kBF16, DType::kF64, DType::kI32, DType::kI64};
constexpr DType kMoved[] = {DType::kF32, DType::kBF16, DType::kF64,
                            DType::kI32, DType::kI64,  DType::kU8};

TEST_F(SingleProcess, AllGatherAndBroadcastMoveEveryType) {
  for (const DType dtype : kMoved) {
    const Bytes expected(dtype, 1);
    Bytes shard(dtype, 1);
    Bytes full(dtype, 77);
    ranks->all_gather(stream, full.tensor(), shard.tensor());
    EXPECT_TRUE(full == expected) << dtype_name(dtype);
    ranks->all_gather(stream, full.tensor(), full.tensor());  // in place
    EXPECT_TRUE(full == expected);
    ranks->broadcast(stream, full.tensor(), 0);
    EXPECT_TRUE(full == expected);
    EXPECT_TRUE(shard == expected);
  }
}

TEST_F(SingleProcess, ReductionsOfOneRankAreItsOwnValues) {
  for (const DType dtype : kSummed) {
    const Bytes expected(dtype, 1);
    Bytes shard(dtype, 77);  // must be overwritten, not added to
    Bytes full(dtype, 1);
    ranks->reduce_scatter(stream, shard.tensor(), full.tensor());
    EXPECT_TRUE(shard == expected) << dtype_name(dtype);
    ranks->reduce_scatter(stream, shard.tensor(), shard.tensor());
    ranks->all_reduce(stream, shard.tensor());
    EXPECT_TRUE(shard == expected);
  }
}

TEST_F(SingleProcess, TensorsThatDoNotFitAreRefused) {
  Bytes a(DType::kF32, 1);
  Bytes b(DType::kF32, 1);
  Bytes other(DType::kI32, 1);
  Bytes bytes(DType::kU8, 1);
  const Tensor strided = Tensor(a.tensor().data, DType::kF32, {10, 10}).col_range(0, 5);
  EXPECT_THROW(ranks->all_gather(stream, a.tensor(), b.tensor(kElements - 1)), Error);
  EXPECT_THROW(ranks->all_gather(stream, a.tensor(), other.tensor()), Error);
  EXPECT_THROW(ranks->reduce_scatter(stream, a.tensor(kElements - 1), b.tensor()), Error);
  EXPECT_THROW(ranks->reduce_scatter(stream, bytes.tensor(), bytes.tensor()), Error);
  EXPECT_THROW(ranks->all_reduce(stream, bytes.tensor()), Error);
  EXPECT_THROW(ranks->all_reduce(stream, strided), Error);
  EXPECT_THROW(ranks->all_reduce(stream, Tensor()), Error);
  EXPECT_THROW(ranks->broadcast(stream, a.tensor(), 1), Error);
  EXPECT_THROW(ranks->broadcast("text", -1), Error);
}

TEST_F(SingleProcess, HostValuesAndGroups) {
  std::vector<double> values = {1.5, -2};
  ranks->sum(values);
  EXPECT_EQ(values, (std::vector<double>{1.5, -2}));
  EXPECT_EQ(ranks->broadcast("text", 0), "text");
  EXPECT_EQ(ranks->all_gather("text"), std::vector<std::string>{"text"});
  ranks->barrier();
  const std::unique_ptr<Communicator> group = ranks->split([](int) { return 3; });
  EXPECT_EQ(group->world(), 1);
  EXPECT_EQ(group->rank(), 0);
  Bytes x(DType::kF64, 1);
  group->all_reduce(stream, x.tensor());
  EXPECT_TRUE(x == Bytes(DType::kF64, 1));
}

TEST_F(SingleProcess, PlanningTouchesNothing) {
  Memory plan(Backend::kPlan);
  Stream planned(plan);
  const Buffer full = planned.allocate(MemoryClass::kWeights, "full", DType::kBF16, {kElements});
  const Buffer shard = planned.allocate(MemoryClass::kWeights, "shard", DType::kBF16, {kElements});
  ranks->all_gather(planned, full, shard);
  ranks->reduce_scatter(planned, shard, full);
}

}  // namespace
}  // namespace sbtrain
