#include <cstdio>

#include "kernels/c_api/pack.h"
#include "kernels/launch.h"

namespace sbtrain::kernels {
namespace {

constexpr int kThreads = 256;

__device__ void check_document(const Pack& p, int n) {
  const int begin = p.given[n];
  const int end = p.given[n + 1];
  const bool outer = (n > 0 || begin == 0) && (n < p.sequences - 1 || end == p.tokens);
  if (outer && begin >= 0 && begin <= end && end <= p.tokens && end - begin <= p.max_seqlen) return;
  printf(
      "sbtrain: cu_seqlens[%d] = %d and cu_seqlens[%d] = %d: they have to rise from 0 to %d "
      "tokens in steps of at most max_seqlen = %d\n",
      n, begin, n + 1, end, p.tokens, p.max_seqlen);
  __trap();
}

// The document of a token: given[n] <= token < given[n + 1].
__device__ int document_of(const Pack& p, int token) {
  int low = 0, high = p.sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.given[middle] <= token ? low : high) = middle;
  }
  return low;
}

__global__ void __launch_bounds__(kThreads) describe_pack_kernel(const Pack p) {
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (p.given == nullptr) {
    if (i <= p.sequences) p.cu_seqlens[i] = i * p.max_seqlen;
    if (i < p.tokens) p.positions[i] = i % p.max_seqlen;
    return;
  }
  if (i < p.sequences) check_document(p, i);
  if (i < p.tokens) p.positions[i] = i - p.given[document_of(p, i)];
}

}  // namespace

void describe_pack(cudaStream_t stream, const Pack& pack) {
  const int64_t most = pack.tokens > pack.sequences ? pack.tokens : int64_t{pack.sequences} + 1;
  describe_pack_kernel<<<blocks(most, kThreads), kThreads, 0, stream>>>(pack);
  check_launch("cu_seqlens");
}

}  // namespace sbtrain::kernels
