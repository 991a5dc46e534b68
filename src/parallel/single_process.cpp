#include "ops/memory.h"
#include "parallel/communicator.h"

namespace sbtrain {
namespace {

class SingleProcess : public Communicator {
 public:
  int rank() const override { return 0; }
  int world() const override { return 1; }
  void all_gather(Stream& s, Tensor full, Tensor shard) override {
    if (full.data != shard.data) ops::run(s, ops::Copy{.y = full, .x = shard});
  }
  void reduce_scatter(Stream& s, Tensor shard, Tensor full) override {
    if (full.data != shard.data) ops::run(s, ops::Add{.y = shard, .x = full});
  }
  void all_reduce(Stream& /*s*/, Tensor /*x*/) override {}
  void sum(std::span<double>) override {}
  std::string broadcast(std::string value, int) override { return value; }
  void barrier() override {}
};

}  // namespace

std::unique_ptr<Communicator> make_single_process() {
  return std::make_unique<SingleProcess>();
}

}  // namespace sbtrain
