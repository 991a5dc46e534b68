// What the communicators between processes have in common: the ranks of a job or some of them,
// whose exchanges on the host go through the job's Control.
#pragma once

#include <string>
#include <vector>

#include "job/control.h"
#include "parallel/communicator.h"

namespace sbtrain {

class JobCommunicator : public Communicator {
 public:
  int rank() const final { return rank_; }
  int world() const final { return static_cast<int>(members_.size()); }

  // Ranks that make different calls all throw ExitCode::kInternal, which names both.
  void sum(std::span<double> values) final;  // added in rank order
  std::string broadcast(std::string value, int root) final;
  std::vector<std::string> all_gather(std::string value) final;
  void barrier() final;
  std::unique_ptr<Communicator> split(const ColorOf& color_of) final;

 protected:
  // `members` are ranks of the job, ascending, this one included. Exchanges of the group have
  // `topic` (job/control.h), which no other group of a member may have.
  JobCommunicator(Control& control, std::vector<int> members, std::string topic);

  // The group of some of the members. Ranks with other colors make their groups at the same time;
  // the color is the place in this communicator of the group's first rank.
  virtual std::unique_ptr<Communicator> make_group(int color, std::vector<int> members,
                                                   std::string topic) = 0;
  Control& control() const { return control_; }
  const std::vector<int>& members() const { return members_; }
  const std::string& topic() const { return topic_; }

 private:
  std::vector<std::string> exchange(std::string_view call, std::string value);

  Control& control_;
  std::vector<int> members_;
  std::string topic_;
  int rank_ = 0;
  int splits_ = 0;
};

}  // namespace sbtrain
