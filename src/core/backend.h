#pragma once

#include <cstdint>

namespace sbtrain {

enum class Backend : uint8_t {
  kPlan,  // sizes only: every op is a no-op, tensors have no data
  kCpu,   // fp32, the readable reference
  kCuda,  // bf16 compute
};
const char* backend_name(Backend backend);

}  // namespace sbtrain
