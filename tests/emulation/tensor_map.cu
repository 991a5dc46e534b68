// Descriptions of tensors for the emulated copy engine (kernels/primitives/tma.cuh), which reads
// what kernels/primitives/tensor_map.h says in place of the driver's encoding; and the shared
// memory.
#include "kernels/primitives/tensor_map.h"

namespace sbtrain::kernels {
namespace {

template <int kRank>
CUtensorMap as_map(const TensorBox<kRank>& x) {
  static_assert(sizeof(x) <= sizeof(CUtensorMap));
  CUtensorMap map{};
  std::memcpy(&map, &x, sizeof(x));
  return map;
}

}  // namespace

alignas(1024) thread_local unsigned char memory[kMaxSharedBytes];

CUtensorMap tensor_map(const TensorBox<3>& x) {
  return as_map(x);
}
CUtensorMap tensor_map(const TensorBox<5>& x) {
  return as_map(x);
}

}  // namespace sbtrain::kernels
