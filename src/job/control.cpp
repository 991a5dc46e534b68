#include "job/control.h"

#include <algorithm>
#include <numeric>

#include "job/control_hub.h"
#include "job/control_spoke.h"

namespace sbtrain {

std::unique_ptr<Control> make_control(const Launch& launch, const Deadlines& deadlines) {
  if (launch.world == 1) return make_single_control();
  Deadlines used = deadlines;
  used.heartbeat = std::min(used.heartbeat, used.progress / 10);
  if (launch.rank == 0) return std::make_unique<control::HubControl>(launch, used);
  return std::make_unique<control::SpokeControl>(launch, used);
}

std::vector<int> all_ranks(int world) {
  std::vector<int> ranks(static_cast<size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace sbtrain
