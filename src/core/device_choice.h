#pragma once

#include <cstdint>

#include "core/enum_names.h"

namespace sbtrain {

// The backend that a user asks for. kAuto: CUDA if there is a GPU.
enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };
template <>
inline constexpr auto kNames<DeviceChoice> = enum_names<DeviceChoice>(
    {{DeviceChoice::kAuto, "auto"}, {DeviceChoice::kCpu, "cpu"}, {DeviceChoice::kCuda, "cuda"}});

}  // namespace sbtrain
