#include "ops/pinned_copy.h"

#include <algorithm>

#include "ops/memory.h"

namespace sbtrain::ops {
namespace {

// Calls copy(part of x, where it lies in the memory) for the parts, in their order.
template <typename Copy>
void for_each_part(const Stream& s, const PinnedMemory& memory, size_t offset, const Tensor& x,
                   const Copy& copy) {
  if (s.planning()) return;
  const size_t element = dtype_size(x.dtype);
  const Tensor flat = x.reshaped({x.numel()});
  for (int64_t at = 0; at < x.numel();) {
    const size_t begin = offset + static_cast<size_t>(at) * element;
    const size_t left = PinnedMemory::kPiece - begin % PinnedMemory::kPiece;
    const int64_t count = std::min(x.numel() - at, static_cast<int64_t>(left / element));
    copy(flat.row_range(at, count), memory.data() + begin);
    at += count;
  }
}

}  // namespace

void copy_to_pinned(Stream& s, const PinnedMemory& memory, size_t offset, const Tensor& x) {
  for_each_part(s, memory, offset, x, [&](const Tensor& part, std::byte* host) {
    run(s, StartCopyToHost{.host = host, .x = part});
  });
}

void copy_from_pinned(Stream& s, const Tensor& x, const PinnedMemory& memory, size_t offset) {
  for_each_part(s, memory, offset, x, [&](const Tensor& part, const std::byte* host) {
    run(s, FetchFromHost{.y = part, .host = host});
  });
}

}  // namespace sbtrain::ops
