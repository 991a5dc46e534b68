#include <utility>

#include "job/control.h"

namespace sbtrain {
namespace {

// Errors of a job of one rank are thrown where they arise, and nobody else is to be told.
class SingleControl : public Control {
 public:
  int rank() const override { return 0; }
  int world() const override { return 1; }
  std::vector<std::string> exchange(std::string_view, std::span<const int> members,
                                    std::string value) override {
    require(members.size() == 1 && members[0] == 0, "an exchange of {} ranks in a job of one",
            members.size());
    return {std::move(value)};
  }
  void progress(std::string_view, std::chrono::milliseconds) override {}
  void waits_for(std::string_view) override {}
  void report(const JobFailure&) override {}
  FailureHandle on_failure(std::function<void(const JobFailure&)>) override { return nullptr; }
  void check() const override {}
  std::optional<JobFailure> failure() const override { return std::nullopt; }
  bool shows_failure() const override { return true; }
  void finish() override {}
};

}  // namespace

std::unique_ptr<Control> make_single_control() {
  return std::make_unique<SingleControl>();
}

}  // namespace sbtrain
