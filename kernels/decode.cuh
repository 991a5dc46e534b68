// Attention of one new token to its cache: the main loop, and how it is launched. What is computed
// of the keys, an Attention, is in decode_softmax.cuh and decode_stickbreaking.cu.
#pragma once

#include <cfloat>
#include <climits>
#include <limits>

#include "kernels/decode.h"
#include "kernels/device_attribute.h"
#include "kernels/kept_keys.cuh"
#include "kernels/pack.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/primitives/math.cuh"
#include "kernels/primitives/stamps.cuh"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {

extern __shared__ __align__(128) unsigned char memory[];

namespace decoding {

inline constexpr int kThreads = 256;
inline constexpr int kBatch =
    4;  // keys of a group after which it looks whether the rest can be skipped
inline constexpr int kHeld = 8;  // neighbouring channels of a head in each lane
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A group of kLanes lanes works on one key after the other; together they hold one head.
struct Channels {
  float value[kHeld] = {};
  // `sum` is what this lane adds to the product.
  template <int kLanes>
  __device__ float dot(const Channels& other, float sum) const {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum += value[i] * other.value[i];
    return lanes_sum<kLanes>(sum);
  }
  __device__ void add(float weight, const Channels& other) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) value[i] += weight * other.value[i];
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) value[i] *= factor;
  }
};

// A row of one head: what a lane has of it.
struct Row {
  Eight held;
  template <bool kVectors>
  static __device__ Row load(const bf16* row, int head_dim, int lane) {
    static_assert(kHeld == 8);
    return {load_eight<kVectors>(row, kHeld * lane, head_dim)};
  }
  __device__ Channels channels() const {
    Channels y;
#pragma unroll
    for (int i = 0; i < kHeld; i += 2) {
      const float2 pair = floats_of(held.pair[i / 2]);
      y.value[i] = pair.x;
      y.value[i + 1] = pair.y;
    }
    return y;
  }
};

// What a block computes: every parts-th part of the keys that a head of a sequence sees, from the
// newest part but `part` on.
struct WorkTile {
  int head;
  int64_t batch;
  int length;  // of the sequence; in pages, each head has its own
  int part, parts;
  int most_parts;  // of a sequence as long as the cache
};

// Where the keys and values of a head lie: at even distances, or in pages.
template <bool kPaged>
struct KeyRows {
  __device__ KeyRows(const Decode& t, int64_t batch, int /*key_head*/, int column)
      : width(t.key_heads * t.head_dim) {
    const int64_t first = batch * t.capacity * width + column;
    k = t.k_cache + first;
    v = t.v_cache + first;
  }
  __device__ bf16* k_row(int i) const { return k + int64_t{i} * width; }
  __device__ bf16* v_row(int i) const { return v + int64_t{i} * width; }
  int width;  // elements from key to key
  bf16* k;
  bf16* v;
};
template <>
struct KeyRows<true> {
  __device__ KeyRows(const Decode& t, int64_t batch, int key_head, int /*column*/)
      : width(t.head_dim), of_head(t.pages.of_head(batch, key_head)) {}
  __device__ bf16* k_row(int i) const {
    return static_cast<bf16*>(page_of(of_head, i)) + i % kPageKeys * width;
  }
  __device__ bf16* v_row(int i) const { return k_row(i) + kPageKeys * width; }
  int width;
  const int64_t* of_head;  // the pages
};

// The head and sequence of a tile. Its length arrives late: what does not depend on it comes first.
template <bool kPaged>
struct CachedHead {
  __device__ CachedHead(const Decode& t, const WorkTile& tile)
      : CachedHead(t, tile, t.heads == t.key_heads ? 1 : t.heads / t.key_heads) {}
  __device__ CachedHead(const Decode& t, const WorkTile& tile, int group)
      : head(tile.head),
        batch(tile.batch),
        key_head(group == 1 ? tile.head : tile.head / group),
        column(key_head * t.head_dim),
        rows(t, batch, key_head, column) {
    // Of the heads that share a key, the first one appends it. Divisions take long.
    appends = t.k.data != nullptr && key_head * group == head && tile.part == 0;
    length = kPaged ? t.lengths[batch * t.key_heads + key_head] : tile.length;
    require(length > 0 && length <= t.capacity);
  }
  // Of the token that the step computes.
  __device__ const bf16* own_k(const Decode& t) const {
    return t.k.data == nullptr ? rows.k_row(length - 1) : t.k.row(batch) + column;
  }
  __device__ const bf16* own_v(const Decode& t) const {
    return t.v.data == nullptr ? rows.v_row(length - 1) : t.v.row(batch) + column;
  }
  __device__ const bf16* q(const Decode& t) const {
    return t.q.row(batch) + int64_t{head} * t.head_dim;
  }
  __device__ bf16* o(const Decode& t) const { return t.o.row(batch) + int64_t{head} * t.head_dim; }
  // Where a part leaves what it gives: head_dim + 2 numbers.
  __device__ float* scratch(const Decode& t, int most_parts, int part) const {
    return t.scratch + ((batch * t.heads + head) * most_parts + part) * (t.head_dim + 2);
  }
  // No block reads what is written here: for the token itself, they read own_k() and own_v().
  __device__ void append(const Decode& t) const {
    static_assert(kMaxDecodeHeadDim <= kThreads);
    const auto c = static_cast<int>(threadIdx.x);
    if (!appends || c >= t.head_dim) return;
    const bf16 of_k = own_k(t)[c];
    const bf16 of_v = own_v(t)[c];
    rows.k_row(length - 1)[c] = of_k;
    rows.v_row(length - 1)[c] = of_v;
  }
  int head;
  int64_t batch;
  int key_head;
  int column;  // of the key's first channel among those of all heads
  KeyRows<kPaged> rows;
  int length;
  bool appends;
};

// Keys that a group takes, newest first, with their values.
template <int kKeys>
struct Batch {
  Row k[kKeys];
  Row v[kKeys];
};

struct Range {
  int begin, end;
  __device__ int count() const { return end - begin; }
  // Part i of n, of sizes as equal as possible.
  __device__ Range part(int i, int n) const {
    if (n == 1) return *this;
    const auto parts = static_cast<unsigned>(n);
    const unsigned size = static_cast<unsigned>(count()) / parts;
    const unsigned rest = static_cast<unsigned>(count()) - size * parts;
    // count() * of / parts, which could take more than 32 bits.
    const auto before = [&](unsigned of) {
      return static_cast<int>(size * of + rest * of / parts);
    };
    return {begin + before(static_cast<unsigned>(i)), begin + before(static_cast<unsigned>(i) + 1)};
  }
};

// Where a sum has two products, fmaf() says which of them is rounded, so that all kernels have the
// same bits.

// Logits are multiplied by log2(e), so that a power of two is a power of e.
//
// What a range of keys gives besides the sum of values. Softmax: the largest logit, and the sum of
// e^(logit - largest). Stick-breaking: what is left of a stick that was whole before, and 0.
struct Part {
  float a, b;
};

// Whether this block is the last of `blocks` that come here with the same counter; what they wrote
// before is then visible to it.
__device__ inline bool last_to_arrive(int32_t* arrived, int blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1) == blocks - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

// Where a lane finds its channels of the keys and values of a head.
template <bool kPaged>
class LaneRows {
 public:
  __device__ LaneRows(const KeyRows<false>& rows, int channel)
      : row_bytes_(2 * rows.width),
        k_(reinterpret_cast<const char*>(rows.k + channel)),
        v_(reinterpret_cast<const char*>(rows.v + channel)) {}
  __device__ const char* k(int i) const { return k_ + int64_t{i} * row_bytes_; }
  __device__ const char* v(int i) const { return v_ + int64_t{i} * row_bytes_; }

 private:
  int row_bytes_;
  const char* k_;
  const char* v_;
};
template <>
class LaneRows<true> {
 public:
  __device__ LaneRows(const KeyRows<true>& rows, int channel) : rows_(rows), channel_(channel) {}
  __device__ const char* k(int i) const {
    return reinterpret_cast<const char*>(rows_.k_row(i) + channel_);
  }
  __device__ const char* v(int i) const {
    return reinterpret_cast<const char*>(rows_.v_row(i) + channel_);
  }

 private:
  KeyRows<true> rows_;
  int channel_;
};

// What a lane reads of the keys and values of a head.
template <int kLanes, bool kVectors, bool kPaged>
class Cached {
 public:
  // Lanes beyond the head's channels read some of these, and find zeros in the query.
  __device__ Cached(const CachedHead<kPaged>& head, int head_dim)
      : rows_(head.rows, kVectors ? min(kHeld * lane(), head_dim - kHeld) : 0),
        head_dim_(head_dim) {}
  // Loads the keys newest, newest - 1, ... of those from `oldest` to `last`. In place of others it
  // loads one of these, if there is any: what it takes to look at each key would cost more.
  template <int kKeys>
  __device__ __forceinline__ void load(int newest, int oldest, int last,
                                       Batch<kKeys>& batch) const {
    if (newest < oldest || last < oldest) return;
#pragma unroll
    for (int b = 0; b < kKeys; ++b) {
      const int i = max(min(newest - b, last), oldest);
      batch.k[b] = row(k(i));
      batch.v[b] = row(v(i));
    }
  }
  __device__ const char* k(int i) const {
    return rows_.k(i);
  }
  __device__ const char* v(int i) const {
    return rows_.v(i);
  }

 private:
  static __device__ int lane() {
    return static_cast<int>(threadIdx.x) % kLanes;
  }
  __device__ Row row(const char* at) const {
    if constexpr (kVectors) return {load_eight(at)};
    return Row::load<false>(reinterpret_cast<const bf16*>(at), head_dim_, lane());
  }
  LaneRows<kPaged> rows_;
  int head_dim_;
};

// Batches of keys in shared memory. Each lane reads what it has copied itself, so there is nothing
// to synchronise.
template <int kBatches, int kKeys>
class BatchesAhead {
 public:
  static constexpr size_t bytes() {
    return size_t{kBatches} * kKeys * 2 * kThreads * sizeof(uint4);
  }
  // Copies the batches whose first key is `newest` and older ones, as far as `keys` has them, and
  // the oldest key in place of what the last batch lacks.
  template <typename Cached>
  __device__ void copy(const Cached& cached, const Range& keys, int newest) const {
#pragma unroll
    for (int i = 0; i < kBatches * kKeys; ++i) {
      if (i % kKeys == 0 && newest - i < keys.begin) break;
      const int row = max(newest - i, keys.begin);
      cp_async16(shared_address(place(i, 0)), cached.k(row));
      cp_async16(shared_address(place(i, 1)), cached.v(row));
    }
    cp_async_commit();
  }
  __device__ void read(int index, Batch<kKeys>& batch) const {
#pragma unroll
    for (int b = 0; b < kKeys; ++b) {
      batch.k[b] = {load_eight(place(index * kKeys + b, 0))};
      batch.v[b] = {load_eight(place(index * kKeys + b, 1))};
    }
  }

 private:
  static __device__ uint4* place(int key, int value) {
    return reinterpret_cast<uint4*>(memory) + (2 * key + value) * kThreads + threadIdx.x;
  }
};

// What a group reads of its keys: two batches in registers, the next kAhead batches of its first
// part in shared memory. While it computes with some, the next ones arrive.
template <int kLanes, bool kVectors, bool kPaged, int kKeys, int kAhead>
class GroupKeys {
  static_assert(kKeys == kBatch || 2 * kKeys == kBatch);

 public:
  __device__ GroupKeys(const CachedHead<kPaged>& head, int head_dim) : cached_(head, head_dim) {}

  // Asks for the first keys of a part but those after `last`.
  __device__ __forceinline__ void load_first(const Range& keys, int last) {
    cached_.load(keys.end - 1, keys.begin, last, batch_);
    cached_.load(keys.end - 1 - kKeys, keys.begin, last, next_);
  }
  // Asks for the keys after these; read() may be called after cp_async_wait<0>().
  __device__ __forceinline__ void copy_ahead(const Range& keys) {
    if constexpr (kAhead > 0) ahead_.copy(cached_, keys, keys.end - 1 - 2 * kKeys);
    taken_ = 0;
  }
  // The part that comes next has nothing in shared memory.
  __device__ __forceinline__ void begin_next_part() { taken_ = kAhead; }
  // Puts a key and value in place of the first ones.
  __device__ __forceinline__ void set_newest(const Row& k, const Row& v) {
    batch_.k[0] = k;
    batch_.v[0] = v;
  }

  // Adds what the keys give to `attend` and `o`. All lanes of a warp take part as long as one of
  // its groups has keys.
  template <typename Attend>
  __device__ __forceinline__ void attend(Attend& attend, const Channels& q, const Range& keys,
                                         Channels& o) {
    const int oldest = keys.begin;
    int newest = keys.end - 1;
    const auto has_keys = [&] { return __any_sync(~0u, newest >= oldest && !attend.complete()); };
    const auto has_half_a_batch = [&] { return __any_sync(~0u, newest >= oldest); };
    const auto add = [&](Batch<kKeys>& of) {
      attend.add(q, of, newest, oldest, o);
      if (taken_ < kAhead) {
        if (newest - 2 * kKeys >= oldest) ahead_.read(taken_, of);
        ++taken_;
      } else {
        cached_.load(newest - 2 * kKeys, oldest, INT_MAX, of);
      }
      newest -= kKeys;
    };
    while (has_keys()) {
      add(batch_);
      if (kKeys == kBatch ? !has_keys() : !has_half_a_batch()) break;
      add(next_);
    }
  }

 private:
  Cached<kLanes, kVectors, kPaged> cached_;
  BatchesAhead<kAhead, kKeys> ahead_;
  Batch<kKeys> batch_{}, next_{};
  int taken_ = 0;  // of the batches in shared memory
};

// What the warps of a block give, in shared memory: each adds its groups' sums, then a thread adds
// the warps' for one channel.
template <int kLanes, typename Attention>
struct WarpSums {
  static constexpr int kWarps = kThreads / 32;
  using Total = typename Attention::Total;
  Part parts[kWarps];
  alignas(16) float outputs[kWarps][kHeld * kLanes];

  __device__ __forceinline__ void put(Part part, Channels& o) {
#pragma unroll
    for (int distance = kLanes; distance < 32; distance *= 2) {
      const Part older{__shfl_xor_sync(~0u, part.a, distance),
                       __shfl_xor_sync(~0u, part.b, distance)};
      Channels older_o;
#pragma unroll
      for (int c = 0; c < kHeld; ++c) {
        older_o.value[c] = __shfl_xor_sync(~0u, o.value[c], distance);
      }
      // Right for the newer groups, of which the last one has the sum of all.
      Attention::join(part, o, older, older_o);
    }
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int group = static_cast<int>(threadIdx.x) / kLanes;
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    if (group % (32 / kLanes) != 32 / kLanes - 1) return;
    if (lane == 0) parts[warp] = part;
#pragma unroll
    for (int c = 0; c < kHeld; c += 4) {
      *reinterpret_cast<float4*>(&outputs[warp][kHeld * lane + c]) = {
          o.value[c], o.value[c + 1], o.value[c + 2], o.value[c + 3]};
    }
  }
  __device__ __forceinline__ Total total(int channel, int channels) const {
    Total sum;
#pragma unroll
    for (int w = kWarps - 1; w >= 0; --w) {
      sum.add(parts[w], channel < channels ? outputs[w][channel] : 0.0f);
    }
    return sum;
  }
};

// Leaves what part i gives in the scratch, for join_parts().
template <typename Head, typename Total>
__device__ __forceinline__ void leave_part(const Decode& t, const Head& head, const WorkTile& tile,
                                           int i, int channel, const Total& sum) {
  float* const to = head.scratch(t, tile.most_parts, i);
  if (channel < t.head_dim) to[channel] = sum.y;
  if (channel == 0) to[t.head_dim] = sum.part.a, to[t.head_dim + 1] = sum.part.b;
}

// Adds up what `count` parts have left, from the newest on.
template <typename Attention, typename Head>
__device__ __forceinline__ typename Attention::Total join_parts(const Attention& attention,
                                                                const Head& head,
                                                                const WorkTile& tile, int count,
                                                                int channel) {
  const Decode& t = attention.p.t;
  const int d = t.head_dim;
  typename Attention::Total total;
  for (int i = count - 1; i >= 0 && !attention.complete(total); --i) {
    const float* const from = head.scratch(t, tile.most_parts, i);
    total.add({__ldcg(from + d), __ldcg(from + d + 1)},
              channel < d ? __ldcg(from + channel) : 0.0f);
  }
  return total;
}

// All threads of the block call this. Groups of kLanes lanes share a part of the keys; the block
// that comes last adds up the parts.
//
// What earlier steps have cached does not depend on the step that computes the query, nor does the
// length, so a group's first keys are loaded before the kernel in front has ended, after which the
// query is there: twice kKeys are under way, and kAhead batches more of the first part, since what
// is asked for after the wait queues behind the weights that the next kernels have asked for.
template <int kLanes, bool kVectors, int kKeys, int kAhead, typename Attention>
__device__ __forceinline__ void attend_cached(const Attention& attention, const WorkTile& tile) {
  constexpr int kGroups = kThreads / kLanes;
  using Total = typename Attention::Total;
  __shared__ WarpSums<kLanes, Attention> sums;
  const Decode& t = attention.p.t;
  const int d = t.head_dim;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int channel = static_cast<int>(threadIdx.x);  // of the sums over warps and parts

  Stamps stamps;
  stamps.take(0);
  const CachedHead<Attention::kPaged> head(t, tile);
  const Range seen = attention.seen(head);
  const int count = decode_parts(seen.count());
  const int newest_part = count - 1 - tile.part;
  const auto keys_of = [&](int part) { return seen.part(part, count).part(group, kGroups); };
  Range keys = keys_of(max(newest_part, 0));
  GroupKeys<kLanes, kVectors, Attention::kPaged, kKeys, kAhead> group_keys(head, d);
  // The token itself is not in the cache yet.
  const auto load_first = [&] { group_keys.load_first(keys, min(keys.end, head.length - 1) - 1); };
  load_first();
  group_keys.copy_ahead(keys);
  wait_for_previous_kernel();
  stamps.take(1);

  // All that the step has computed is asked for at once, before anything waits for it.
  const Row query = Row::load<kVectors>(head.q(t), d, lane);
  if (keys.count() > 0 && keys.end == head.length) {
    group_keys.set_newest(Row::load<kVectors>(head.own_k(t), d, lane),
                          Row::load<kVectors>(head.own_v(t), d, lane));
  }
  head.append(t);
  if (newest_part < 0) return;
  Channels q = query.channels();
  q.scale(kLog2e * t.scale);
  cp_async_wait<0>();
  stamps.take(2);
  const auto store = [&](const Total& of) {
    if (channel >= d) return;
    head.o(t)[channel] = __float2bfloat16_rn(attention.result(head, of, channel));
  };
  Total total;  // of the parts so far, without their values
  for (int i = newest_part; i >= 0; i -= tile.parts) {
    if (i < newest_part) {
      load_first();
      group_keys.begin_next_part();
    }
    typename Attention::template Attend<kLanes> attend(attention, head, lane);
    Channels o;
    group_keys.attend(attend, q, keys, o);
    stamps.take(3);
    sums.put(attend.part, o);
    __syncthreads();
    stamps.take(4);
    if (count == 1 && channel / 32 * 32 >= d) return;  // the warp has no channel
    const Total sum = sums.total(channel, d);
    // Where this path and that of several parts end alike, the compiler forms the addresses of all
    // keys by each thread, and not once for the block.
    if (count == 1) {
      store(sum);
      stamps.take(5);
      if (threadIdx.x == 0) stamps.keep(0, 0);
      return;
    }
    leave_part(t, head, tile, i, channel, sum);
    // A block that has the head for itself knows what the newer parts leave.
    total.add(sum.part, 0.0f);
    if (tile.parts == 1 && attention.complete(total)) break;
    if (i >= tile.parts) keys = keys_of(i - tile.parts);
    __syncthreads();  // all have read the sums of the warps
  }
  if (tile.parts == 1) {
    __syncthreads();
  } else {
    const int blocks = min(tile.parts, count);
    if (!last_to_arrive(t.arrived + head.batch * t.heads + head.head, blocks)) return;
  }
  store(join_parts(attention, head, tile, count, channel));
}

inline bool has_vectors(const Decode& t) {
  // Pages begin at multiples of 256 bytes.
  if (t.pages.data != nullptr) {
    return t.head_dim % kHeld == 0 && vectors_fit<kHeld>(t.q, t.k, t.v);
  }
  const Matrix<const bf16> cache{t.k_cache, int64_t{t.key_heads} * t.head_dim};
  return t.head_dim % kHeld == 0 &&
         vectors_fit<kHeld>(cache, Matrix<const bf16>{t.v_cache, 0}, t.q, t.k, t.v);
}

// While there are few blocks, each of them has many keys under way; many blocks have more of them
// on a multiprocessor instead.
enum class Blocks { kFew, kSome, kMany };
constexpr int keys_at_once(Blocks blocks) {
  return blocks == Blocks::kMany ? kBatch / 2 : kBatch;
}
// With the two batches in registers they make the 16 keys of a group of a part of 512.
constexpr int batches_ahead(Blocks blocks) {
  return blocks == Blocks::kFew ? 2 : 0;
}

// The blocks of a launch. They are a matter of speed alone: no bit depends on them.
struct Grid {
  explicit Grid(const Decode& t) : heads(t.batch * t.heads) {
    const int64_t most = decode_blocks(multiprocessors());
    of_head = heads >= most ? 1 : std::min(most / heads, decode_parts(t.capacity));
  }
  Blocks blocks() const {
    if (heads > 2 * multiprocessors()) return Blocks::kMany;
    // Up to this many leave most of the shared memory to the weights of the kernels that follow.
    return heads * of_head <= half_of_multiprocessors() ? Blocks::kFew : Blocks::kSome;
  }
  int64_t heads;    // of all sequences
  int64_t of_head;  // blocks that share one
};

// Block (h, b, z) computes head h of sequence b, together with the other blocks of that head.
template <int kLanes, bool kVectors, Blocks kBlocks, typename Attention>
__global__ void __launch_bounds__(kThreads, kBlocks == Blocks::kMany ? 3 : 2)
    decode_kernel(const __grid_constant__ Attention attention, int most_parts) {
  let_next_kernel_begin();
  attend_cached<kLanes, kVectors, keys_at_once(kBlocks), batches_ahead(kBlocks)>(
      attention, {static_cast<int>(blockIdx.x), blockIdx.y,
                  Attention::kPaged ? 0 : attention.p.t.lengths[blockIdx.y],
                  static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z), most_parts});
}

// What an Attention is compiled for. What kGeneric lacks costs time, and no bit.
enum class Compiled {
  kTuned,    // few blocks, some and many, for heads of up to 128 channels that are read in vectors
  kGeneric,  // some blocks
};

template <int kLanes, bool kVectors, Blocks kBlocks, typename Attention>
void launch(const char* name, cudaStream_t stream, const Attention& attention, const Grid& grid) {
  const Decode& t = attention.p.t;
  launch_early(name, t.early, stream, decode_kernel<kLanes, kVectors, kBlocks, Attention>,
               {dim3(static_cast<unsigned>(t.heads), static_cast<unsigned>(t.batch),
                     static_cast<unsigned>(grid.of_head)),
                kThreads, BatchesAhead<batches_ahead(kBlocks), kBatch>::bytes()},
               attention, static_cast<int>(decode_parts(t.capacity)));
}

template <int kLanes, typename Attention>
void launch_vectors(const char* name, cudaStream_t stream, const Attention& attention,
                    const Grid& grid) {
  if constexpr (Attention::kCompiled == Compiled::kTuned && kLanes < 32) {
    const Blocks blocks = grid.blocks();
    if (blocks == Blocks::kMany) {
      return launch<kLanes, true, Blocks::kMany>(name, stream, attention, grid);
    }
    if (blocks == Blocks::kFew) {
      return launch<kLanes, true, Blocks::kFew>(name, stream, attention, grid);
    }
  }
  launch<kLanes, true, Blocks::kSome>(name, stream, attention, grid);
}

// With the fewest lanes that hold one head. Heads that cannot be read in vectors have one kernel
// for all sizes.
template <typename Attention>
void decode(const char* name, cudaStream_t stream, const Attention& attention) {
  const Decode& t = attention.p.t;
  write_stamps_at_exit(name);
  if (t.head_dim > kMaxDecodeHeadDim) {
    throw_invalid_argument("%s: heads of %d channels, at most %d", name, t.head_dim,
                           static_cast<int>(kMaxDecodeHeadDim));
  }
  if (t.batch == 0 || t.heads == 0) return;
  const Grid grid(t);
  if (has_vectors(t)) {
    if (t.head_dim <= 32) return launch_vectors<4>(name, stream, attention, grid);
    if (t.head_dim <= 64) return launch_vectors<8>(name, stream, attention, grid);
    if (t.head_dim <= 128) return launch_vectors<16>(name, stream, attention, grid);
    if constexpr (Attention::kCompiled == Compiled::kTuned) {
      return launch_vectors<32>(name, stream, attention, grid);
    }
  }
  launch<32, false, Blocks::kSome>(name, stream, attention, grid);
}

}  // namespace decoding
}  // namespace sbtrain::kernels
