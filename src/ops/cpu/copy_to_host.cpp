#include "ops/copy_to_host.h"

#include <cstring>

#include "ops/cpu/parallel.h"

namespace sbtrain::ops::cpu {

void run(Cpu, Stream& /*s*/, const StartCopyToHost& op) {
  auto* to = static_cast<std::byte*>(op.host);
  const auto* from = static_cast<const std::byte*>(op.x.data);
  const auto size = static_cast<int64_t>(dtype_size(op.x.dtype));
  parallel_rows(op.x.numel(), 1, [&](int64_t begin, int64_t end) {
    std::memcpy(to + begin * size, from + begin * size, static_cast<size_t>((end - begin) * size));
  });
}

}  // namespace sbtrain::ops::cpu
