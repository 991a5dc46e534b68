#include "train/communicator_options.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace sbtrain {

CommunicatorOptions communicator_options(const TrainConfig& train) {
  return {
      .copy_engines = train.gather_engine == TransferEngine::kCopyEngines,
      .connect_timeout = std::chrono::seconds(std::max(1L, std::lround(train.rendezvous_timeout)))};
}

}  // namespace sbtrain
