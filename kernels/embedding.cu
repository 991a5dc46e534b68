#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "kernels/elementwise.cuh"
#include "kernels/embedding.h"

namespace sbtrain::kernels {
namespace {

constexpr int kWidth = 8;

struct EmbeddingOp {
  Embedding p;
  template <int kWidth>
  __device__ Pack<bf16, kWidth> load(int64_t row, int64_t col) const {
    const int32_t id = p.ids[row];
    require(id >= 0 && id < p.vocab);
    return load_pack<kWidth>(p.w.row(id) + col);
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Pack<bf16, kWidth>& loaded) const {
    auto y = convert<float>(loaded);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) y[i] *= p.scale;
    store_floats(p.y.row(row) + col, y);
  }
};

struct IndexOp {
  int32_t* indices;
  template <int kWidth>
  __device__ int32_t load(int64_t /*row*/, int64_t col) const {
    return static_cast<int32_t>(col);
  }
  template <int kWidth>
  __device__ void store(int64_t /*row*/, int64_t col, int32_t index) const {
    indices[col] = index;
  }
};

// Tokens in the order of their ids; those of one id are in the order of t.
struct Sorted {
  const int32_t* ids;
  const int32_t* indices;
  float* sums;
};

constexpr int kThreads = 256;
constexpr int kChunk = kEmbeddingChunk;

// Sums the runs of equal ids in one chunk of sorted tokens. A run that lies within the chunk goes
// straight to dw; the chunk's part of a run that reaches beyond it goes to the chunk's first row of
// sums if the run began before the chunk, else to the second.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    sum_chunks_kernel(const EmbeddingBackward p, const Sorted sorted) {
  constexpr int kBatch = 8;  // rows in flight
  __shared__ int32_t ids[kChunk];
  __shared__ int32_t indices[kChunk];
  const int64_t begin = int64_t{blockIdx.x} * kChunk;
  const int count = static_cast<int>(min(int64_t{kChunk}, p.tokens - begin));
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    ids[i] = sorted.ids[begin + i];
    indices[i] = sorted.indices[begin + i];
    require(ids[i] >= 0 && ids[i] < p.vocab);
  }
  __syncthreads();
  const bool begins_before = begin > 0 && sorted.ids[begin - 1] == ids[0];
  const bool ends_behind = begin + count < p.tokens && sorted.ids[begin + count] == ids[count - 1];
  const int64_t col = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kWidth;
  if (col >= p.width) return;
  bool first_run = true;
  Pack<float, kWidth> sum{};
  for (int batch = 0; batch < count; batch += kBatch) {
    Pack<bf16, kWidth> dy[kBatch];
    Pack<float, kWidth> before[kBatch];  // what dw holds, for where a run ends
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {  // without conditions, so that no load waits for another
      const int i = min(batch + b, count - 1);
      dy[b] = load_pack<kWidth>(p.dy.row(indices[i]) + col);
      before[b] = load_pack<kWidth>(p.dw.row(ids[i]) + col);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = batch + b;
      if (i >= count) break;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum[j] += to_float(dy[b][j]);
      const bool last = i + 1 == count;
      if (!last && ids[i + 1] == ids[i]) continue;
      const bool earlier = first_run && begins_before;
      if (earlier || (last && ends_behind)) {
        store_pack(sorted.sums + (2 * int64_t{blockIdx.x} + (earlier ? 0 : 1)) * p.width + col,
                   sum);
      } else {
        auto total = before[b];
#pragma unroll
        for (int j = 0; j < kWidth; ++j) total[j] += p.scale * sum[j];
        store_pack(p.dw.row(ids[i]) + col, total);
      }
      sum = {};
      first_run = false;
    }
  }
}

// The first of the sorted tokens from `begin` on whose id is above `id`.
__device__ int64_t run_end(const int32_t* ids, int64_t begin, int64_t end, int32_t id) {
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (ids[middle] <= id) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// Adds up the run that begins in this block's chunk and reaches beyond it, if there is one.
template <int kWidth>
__global__ void __launch_bounds__(kThreads)
    join_chunks_kernel(const EmbeddingBackward p, const Sorted sorted) {
  const int64_t chunk = blockIdx.x;
  const int64_t begin = chunk * kChunk;
  const int64_t end = begin + kChunk;
  const int32_t id = sorted.ids[end - 1];
  if (sorted.ids[end] != id || (begin > 0 && sorted.ids[begin - 1] == id)) return;
  const int64_t col = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * kWidth;
  if (col >= p.width) return;
  const int64_t last_chunk = (run_end(sorted.ids, end, p.tokens, id) - 1) / kChunk;
  auto sum = load_pack<kWidth>(sorted.sums + (2 * chunk + 1) * p.width + col);
#pragma unroll 8
  for (int64_t c = chunk + 1; c <= last_chunk; ++c) {
    const auto part = load_pack<kWidth>(sorted.sums + 2 * c * p.width + col);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) sum[j] += part[j];
  }
  float* dw = p.dw.row(id) + col;
  auto total = load_pack<kWidth>(dw);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) total[j] += p.scale * sum[j];
  store_pack(dw, total);
}

Sorted sort_tokens(cudaStream_t stream, const EmbeddingBackward& p) {
  const EmbeddingScratch layout = embedding_scratch(p.tokens, p.width);
  const auto at = [&](size_t offset) { return reinterpret_cast<std::byte*>(p.scratch) + offset; };
  auto* indices = reinterpret_cast<int32_t*>(at(layout.indices));
  auto* sorted_ids = reinterpret_cast<int32_t*>(at(layout.sorted_tokens));
  auto* sorted_indices = reinterpret_cast<int32_t*>(at(layout.sorted_indices));
  launch_elementwise<1>(stream, "embedding_backward", 1, p.tokens, false, IndexOp{indices});
  const int bits =
      std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(p.vocab - 1))));
  const auto sort = [&](void* scratch, size_t& bytes) {
    // Ids are not negative, so they sort as unsigned numbers, by the bits that the vocabulary
    // needs.
    const cudaError_t error = cub::DeviceRadixSort::SortPairs(
        scratch, bytes, reinterpret_cast<const uint32_t*>(p.ids),
        reinterpret_cast<uint32_t*>(sorted_ids), indices, sorted_indices,
        static_cast<int>(p.tokens), 0, bits, stream);
    check_cuda("embedding_backward", error);
  };
  size_t bytes = 0;
  sort(nullptr, bytes);
  if (bytes > layout.sort_bytes) {
    throw_runtime_error("embedding_backward: sorting %lld tokens takes %zu bytes; planned: %zu",
                        static_cast<long long>(p.tokens), bytes, layout.sort_bytes);
  }
  sort(at(layout.sort), bytes);
  return {sorted_ids, sorted_indices, reinterpret_cast<float*>(at(layout.sums))};
}

}  // namespace

void launch(cudaStream_t stream, const Embedding& p) {
  const bool vectors = vectors_fit<kWidth>(p.y, p.w);
  launch_elementwise<kWidth>(stream, "embedding", p.tokens, p.width, vectors, EmbeddingOp{p});
}

void launch(cudaStream_t stream, const EmbeddingBackward& p) {
  if (p.tokens == 0 || p.width == 0) return;
  const Sorted sorted = sort_tokens(stream, p);
  const bool vectors = p.width % kWidth == 0 && vectors_fit<kWidth>(p.dw, p.dy);
  with_width<kWidth>(vectors, [&](auto width) {
    constexpr int kPackWidth = decltype(width)::value;
    const int64_t packs = p.width / kPackWidth;
    const auto threads =
        static_cast<unsigned>(std::min<int64_t>(kThreads, ceil_div(packs, 32) * 32));
    const unsigned slices = blocks(packs, threads);
    const unsigned chunks = blocks(p.tokens, kChunk);
    sum_chunks_kernel<kPackWidth><<<dim3(chunks, slices), threads, 0, stream>>>(p, sorted);
    check_launch("embedding_backward");
    if (chunks == 1) return;
    join_chunks_kernel<kPackWidth><<<dim3(chunks - 1, slices), threads, 0, stream>>>(p, sorted);
    check_launch("embedding_backward");
  });
}

}  // namespace sbtrain::kernels
