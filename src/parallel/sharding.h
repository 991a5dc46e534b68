// What a run lets its ranks choose about the shards of a model.
#pragma once

#include <cstdint>

#include "core/enum_names.h"

namespace sbtrain {

// What is spread over the ranks of a run (parallel/mesh.h).
enum class Sharding : uint8_t { kFull, kGrad, kNone, kHybrid };
template <>
inline constexpr auto kNames<Sharding> = enum_names<Sharding>({{Sharding::kFull, "full"},
                                                               {Sharding::kGrad, "grad"},
                                                               {Sharding::kNone, "none"},
                                                               {Sharding::kHybrid, "hybrid"}});

// The type in which gradients travel between ranks.
enum class ReduceType : uint8_t { kFloat32, kBfloat16 };
template <>
inline constexpr auto kNames<ReduceType> = enum_names<ReduceType>(
    {{ReduceType::kFloat32, "float32"}, {ReduceType::kBfloat16, "bfloat16"}});

// What moves data between the GPUs of a node.
enum class TransferEngine : uint8_t {
  kMultiprocessors,
  kCopyEngines,
  kAuto  // until the ranks have looked at their machine (train/engines.h)
};
template <>
inline constexpr auto kNames<TransferEngine> =
    enum_names<TransferEngine>({{TransferEngine::kMultiprocessors, "multiprocessors"},
                                {TransferEngine::kCopyEngines, "copy_engines"},
                                {TransferEngine::kAuto, "auto"}});

}  // namespace sbtrain
