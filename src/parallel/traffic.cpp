#include "parallel/traffic.h"

#include <set>

#include "core/error.h"
#include "job/control.h"

namespace sbtrain {
namespace {

class PlannedCommunicator : public Communicator {
 public:
  // `members`: the ranks of the job that are in this group; `rank` is this rank's place among them.
  PlannedCommunicator(std::vector<int> members, int rank, int node_size, Traffic* record)
      : members_(std::move(members)), rank_(rank), node_size_(node_size), record_(record) {
    std::set<int> nodes;
    for (const int member : members_) nodes.insert(member / node_size_);
    group_ = {.ranks = world(), .nodes = static_cast<int>(nodes.size())};
  }

  int rank() const override { return rank_; }
  int world() const override { return static_cast<int>(members_.size()); }

  void sum(std::span<double> values) override {
    for (double& value : values) value *= world();
  }
  std::string broadcast(std::string value, int root) override {
    require(root >= 0 && root < world(), "broadcast: no rank {} among {}", root, world());
    return value;
  }
  std::vector<std::string> all_gather(std::string value) override {
    return std::vector<std::string>(members_.size(), value);
  }
  void barrier() override {}

  std::unique_ptr<Communicator> split(const ColorOf& color_of) override {
    std::vector<int> members;
    int rank = 0;
    for (int r = 0; r < world(); ++r) {
      if (color_of(r) != color_of(rank_)) continue;
      if (r == rank_) rank = static_cast<int>(members.size());
      members.push_back(members_[r]);
    }
    return std::make_unique<PlannedCommunicator>(std::move(members), rank, node_size_, record_);
  }

 protected:
  void plan(Collective collective, const Tensor& whole) override {
    if (!record_) return;
    record_->transfers.push_back(
        {.collective = collective, .group = group_, .bytes = static_cast<int64_t>(whole.bytes())});
  }
  void run_all_gather(Stream&, const Tensor&, const Tensor&) override { refuse(); }
  void run_reduce_scatter(Stream&, const Tensor&, const Tensor&) override { refuse(); }
  void run_all_to_all(Stream&, const Tensor&, const Tensor&) override { refuse(); }
  void run_shift(Stream&, const Tensor&, const Tensor&, Neighbours) override { refuse(); }
  void run_all_reduce(Stream&, const Tensor&) override { refuse(); }
  void run_broadcast(Stream&, const Tensor&, int) override { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    fail(ExitCode::kInternal, "the communicator of a plan moves nothing");
  }

  std::vector<int> members_;
  int rank_;
  int node_size_;
  Traffic* record_;
  GroupLayout group_;
};

}  // namespace

std::unique_ptr<Communicator> make_planned(int rank, int world, int node_size, Traffic* record) {
  require(world > 0 && rank >= 0 && rank < world && node_size > 0,
          "a plan for rank {} of {} with {} a node", rank, world, node_size);
  return std::make_unique<PlannedCommunicator>(all_ranks(world), rank, node_size, record);
}

}  // namespace sbtrain
