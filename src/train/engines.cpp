#include "train/engines.h"

#include <algorithm>
#include <string>
#include <vector>

#include "core/gpus.h"
#include "core/log.h"
#include "parallel/make_communicator.h"

namespace sbtrain {

TrainConfig with_engines(TrainConfig train, bool copy_engines) {
  if (train.gather_engine == TransferEngine::kAuto) {
    train.gather_engine =
        copy_engines ? TransferEngine::kCopyEngines : TransferEngine::kMultiprocessors;
  }
  if (train.reduce_engine == TransferEngine::kAuto) train.reduce_engine = train.gather_engine;
  return train;
}

TrainConfig with_engines(const TrainConfig& train, Control& control, const Launch& launch,
                         Backend backend) {
  if (train.gather_engine != TransferEngine::kAuto || launch.world == 1) {
    return with_engines(train, /*copy_engines=*/false);
  }
  const bool mine = backend == Backend::kCuda && launch.nodes == 1 && nvlink_connects_gpus() &&
                    nccl_may_reach_other_gpus();
  const std::vector<std::string> all =
      control.exchange("engines", all_ranks(launch.world), mine ? "1" : "0");
  const bool copy_engines = std::ranges::count(all, "0") == 0;
  if (launch.rank == 0 && backend == Backend::kCuda) {
    log_info("train.gather_engine: auto is {}",
             copy_engines ? "copy_engines: NVLink connects the GPUs of all ranks"
                          : "multiprocessors: not all ranks see GPUs of one machine with NVLink "
                            "whose memory NCCL may reach");
  }
  return with_engines(train, copy_engines);
}

}  // namespace sbtrain
