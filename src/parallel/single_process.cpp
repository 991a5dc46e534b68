#include "core/error.h"
#include "parallel/communicator.h"

namespace sbtrain {
namespace {

class SingleProcess : public Communicator {
 public:
  int rank() const override { return 0; }
  int world() const override { return 1; }
  void sum(std::span<double>) override {}
  std::string broadcast(std::string value, int root) override {
    require(root == 0, "broadcast: no rank {} among 1", root);
    return value;
  }
  std::vector<std::string> all_gather(std::string value) override { return {std::move(value)}; }
  void barrier() override {}
  std::unique_ptr<Communicator> split(const ColorOf& /*color_of*/) override {
    return std::make_unique<SingleProcess>();
  }

 protected:
  void run_all_gather(Stream& s, const Tensor& full, const Tensor& shard) override {
    move(s, full, shard);
  }
  void run_reduce_scatter(Stream& s, const Tensor& shard, const Tensor& full) override {
    move(s, shard, full);
  }
  void run_all_to_all(Stream&, const Tensor&, const Tensor&) override {}
  void run_shift(Stream& s, const Tensor& to, const Tensor& from, Neighbours) override {
    move(s, to, from);
  }
  void run_all_reduce(Stream&, const Tensor&) override {}
  void run_broadcast(Stream&, const Tensor&, int) override {}

 private:
  static void move(Stream& s, const Tensor& to, const Tensor& from) {
    if (to.data != from.data) s.copy_bytes(to.data, from.data, from.bytes());
  }
};

}  // namespace

std::unique_ptr<Communicator> make_single_process() {
  return std::make_unique<SingleProcess>();
}

}  // namespace sbtrain
