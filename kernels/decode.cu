// Attention of one new token to its cache, and the cache.
#include <cfloat>
#include <climits>
#include <limits>
#include <utility>

#include "kernels/attention/fire.h"
#include "kernels/decode.h"
#include "kernels/elementwise.cuh"
#include "kernels/pack.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/dependent_launch.cuh"
#include "kernels/primitives/math.cuh"
#include "kernels/primitives/stamps.cuh"
#include "kernels/reduce.cuh"

namespace sbtrain::kernels {

extern __shared__ __align__(128) unsigned char memory[];

namespace {

template <typename T>
struct CacheAppendOp {
  CacheAppend p;
  template <int kWidth>
  __device__ Pack<T, kWidth> load(int64_t row, int64_t col) const {
    return load_pack<kWidth>(static_cast<const T*>(p.x.data) + row * p.x.stride + col);
  }
  template <int kWidth>
  __device__ void store(int64_t row, int64_t col, const Pack<T, kWidth>& loaded) const {
    const int64_t position = p.positions[row];
    require(position >= 0 && position < p.capacity);
    store_pack(static_cast<T*>(p.cache) + (row * p.capacity + position) * p.cols + col, loaded);
  }
};

template <typename T>
void append(cudaStream_t stream, const CacheAppend& p) {
  const bool vectors = vectors_fit<8>(Matrix<T>{static_cast<T*>(p.cache), p.cols},
                                      Matrix<const T>{static_cast<const T*>(p.x.data), p.x.stride});
  launch_elementwise<8>(stream, "cache_append", p.batch, p.cols, vectors, CacheAppendOp<T>{p});
}

constexpr int kThreads = 256;
constexpr int kBatch = 4;  // keys of a group after which it looks whether the rest can be skipped
constexpr int kHeld = 8;   // neighbouring channels of a head in each lane
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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
struct Job {
  int head;
  int64_t batch;
  int length;  // of the sequence
  int part, parts;
  int most_parts;  // of a sequence as long as the cache
};

// The head and sequence of a job. Its length arrives late: what does not depend on it comes first.
struct CachedHead {
  __device__ CachedHead(const Decode& t, const Job& job)
      : head(job.head), batch(job.batch), width(t.key_heads * t.head_dim) {
    // Of the heads that share a key, the first one appends it. Divisions take long.
    const int group = t.heads == t.key_heads ? 1 : t.heads / t.key_heads;
    const int key_head = group == 1 ? head : head / group;
    column = key_head * t.head_dim;
    appends = t.k.data != nullptr && key_head * group == head && job.part == 0;
    const int64_t first = batch * t.capacity * width + column;
    k = t.k_cache + first;
    v = t.v_cache + first;
    length = job.length;
    require(length > 0 && length <= t.capacity);
  }
  __device__ bf16* k_row(int i) const { return k + int64_t{i} * width; }
  __device__ bf16* v_row(int i) const { return v + int64_t{i} * width; }
  // Of the token that the step computes.
  __device__ const bf16* own_k(const Decode& t) const {
    return t.k.data == nullptr ? k_row(length - 1) : t.k.row(batch) + column;
  }
  __device__ const bf16* own_v(const Decode& t) const {
    return t.v.data == nullptr ? v_row(length - 1) : t.v.row(batch) + column;
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
    k_row(length - 1)[c] = of_k;
    v_row(length - 1)[c] = of_v;
  }
  int head;
  int64_t batch;
  int width;   // elements from key to key
  int column;  // of the key's first channel
  bf16* k;
  bf16* v;
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

// What a bias adds to the logit of the key `distance` tokens before the query, as the sum over the
// lanes of a group; of_head<kLanes>(head, position of the query, lane) creates it.
struct NoBias {
  template <int kLanes>
  __device__ NoBias of_head(int, int64_t, int) const {
    return {};
  }
  __device__ float operator()(int) const { return 0.0f; }
};

struct AlibiBias {
  struct OfHead {
    float slope;  // 0 except on one lane
    __device__ float operator()(int distance) const {
      return -slope * static_cast<float>(distance);
    }
  };
  template <int kLanes>
  __device__ OfHead of_head(int head, int64_t, int lane) const {
    return {lane == 0 ? kLog2e * slopes.of_head[head] : 0.0f};
  }
  AlibiSlopes slopes;
};

// The lanes share the hidden units. b2 shifts all logits of the head alike, so it is left out.
struct FireBias {
  template <int kUnits>
  struct OfHead {
    float rate, r, w1[kUnits], b1[kUnits], w2[kUnits];
    __device__ float operator()(int distance) const {
      const float u = log1pf(rate * static_cast<float>(distance)) * r;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) sum += w2[i] * fmaxf(fmaf(w1[i], u, b1[i]), 0.0f);
      return sum;
    }
  };
  template <int kLanes>
  __device__ auto of_head(int head, int64_t position, int lane) const {
    static_assert(kFireUnits == 32);
    constexpr int kUnits = kFireUnits / kLanes;
    const float c = to_float(*x.c);
    OfHead<kUnits> of;
    of.rate = fabsf(c);
    of.r = fire_query(c, to_float(*x.m), static_cast<int>(position)).r;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = kUnits * lane + i;
      of.w1[i] = to_float(x.w1[unit]);
      of.b1[i] = to_float(x.b1[unit]);
      of.w2[i] = kLog2e * to_float(x.w2[head * kFireUnits + unit]);
    }
    return of;
  }
  FireParameters x;
};

template <typename Bias>
struct Softmax {
  SoftmaxDecode p;
  Bias biases;

  __device__ Range seen(const CachedHead& head) const {
    const bool all = p.window <= 0 || p.window >= head.length;
    return {all ? 0 : head.length - static_cast<int>(p.window), head.length};
  }
  template <int kLanes>
  struct Attend {
    decltype(std::declval<const Bias&>().template of_head<kLanes>(0, 0, 0)) bias;
    int last;  // the newest key
    Part part{-FLT_MAX, 0.0f};
    __device__ Attend(const Softmax& of, const CachedHead& head, int lane)
        : bias(of.biases.template of_head<kLanes>(head.head, head.length - 1, lane)),
          last(head.length - 1) {}
    template <int kKeys>
    __device__ void add(const Channels& q, const Batch<kKeys>& batch, int newest, int oldest,
                        Channels& o) {
      float z[kKeys];
#pragma unroll
      for (int b = 0; b < kKeys; ++b) {
        z[b] = q.dot<kLanes>(batch.k[b].channels(), bias(last - max(newest - b, oldest)));
        if (newest - b < oldest) z[b] = -kInfinity;
      }
      // Two at a time for one correction of what has been added up.
      static_assert(kKeys % 2 == 0);
#pragma unroll
      for (int b = 0; b < kKeys; b += 2) {
        const float larger = fmaxf(part.a, fmaxf(z[b], z[b + 1]));
        const float rescale = exp2_ftz(part.a - larger);
        const float newer = exp2_ftz(z[b] - larger);
        const float older = exp2_ftz(z[b + 1] - larger);
        part.a = larger;
        part.b = fmaf(part.b, rescale, newer + older);
        o.scale(rescale);
        o.add(newer, batch.v[b].channels());
        o.add(older, batch.v[b + 1].channels());
      }
    }
    __device__ bool complete() const {
      return false;
    }
  };
  // Adds what the next older keys give.
  static __device__ void join(Part& part, Channels& o, const Part& older, const Channels& older_o) {
    const float larger = fmaxf(part.a, older.a);
    const float mine = exp2_ftz(part.a - larger);
    const float theirs = exp2_ftz(older.a - larger);
    part = {larger, fmaf(part.b, mine, older.b * theirs)};
    o.scale(mine);
    o.add(theirs, older_o);
  }
  // The sum of what parts give, from the newest to the oldest.
  struct Total {
    Part part{-FLT_MAX, 0.0f};
    float y = 0.0f;  // of one channel
    __device__ void add(const Part& other, float other_y) {
      const float larger = fmaxf(part.a, other.a);
      const float mine = exp2_ftz(part.a - larger);
      const float theirs = exp2_ftz(other.a - larger);
      part = {larger, fmaf(part.b, mine, other.b * theirs)};
      y = fmaf(y, mine, other_y * theirs);
    }
  };
  __device__ bool complete(const Total&) const {
    return false;
  }
  __device__ float result(const CachedHead&, const Total& total, int) const {
    return total.y / total.part.b;
  }
};

// The parts of the stick that one key takes and leaves, by its logit times log2(e). Neither is
// computed by a subtraction that cancels.
struct Break {
  float beta, rest;
};
__device__ inline Break break_at(float z, float gate) {
  const float e = exp2_ftz(-fabsf(z));
  const float large = reciprocal_ftz(1.0f + e);
  const float small = e * large;
  const float sigma = z > 0.0f ? large : small;
  const float complement = z > 0.0f ? small : large;
  return {gate * sigma, (1.0f - gate) + gate * complement};
}

// A group breaks the stick as if it were whole when it comes to the group's keys; what the newer
// keys leave of it is multiplied in at the end. The part of the stick that a group sees is never
// shorter than the true one, so it is safe to compare it with skip_epsilon.
struct StickBreaking {
  StickBreakingDecode p;

  __device__ Range seen(const CachedHead& head) const {
    return {0, p.attend_current ? head.length : head.length - 1};
  }
  template <int kLanes>
  struct Attend {
    const float* gates;
    int stride;  // of the gates from key to key
    float skip_epsilon;
    Part part{1.0f, 0.0f};
    __device__ Attend(const StickBreaking& of, const CachedHead& head, int)
        : gates(of.p.gate_cache), stride(of.p.t.heads), skip_epsilon(of.p.skip_epsilon) {
      if (gates != nullptr) gates += head.batch * of.p.t.capacity * stride + head.head;
    }
    template <int kKeys>
    __device__ void add(const Channels& q, const Batch<kKeys>& batch, int newest, int oldest,
                        Channels& o) {
      float gate[kKeys];
#pragma unroll
      for (int b = 0; b < kKeys; ++b) gate[b] = 1.0f;
      if (gates != nullptr) {
#pragma unroll
        for (int b = 0; b < kKeys; ++b) {
          if (newest - b >= oldest) gate[b] = gates[int64_t{newest - b} * stride];
        }
      }
      Break pieces[kKeys];
#pragma unroll
      for (int b = 0; b < kKeys; ++b) {
        const float z = q.dot<kLanes>(batch.k[b].channels(), 0.0f);
        // A logit of -infinity takes nothing of the stick.
        pieces[b] = break_at(newest - b >= oldest ? z : -kInfinity, gate[b]);
      }
#pragma unroll
      for (int b = 0; b < kKeys; ++b) {
        o.add(pieces[b].beta * part.a, batch.v[b].channels());
        part.a *= pieces[b].rest;
      }
    }
    __device__ bool complete() const {
      return part.a < skip_epsilon;
    }
  };
  // Adds what the next older keys give.
  static __device__ void join(Part& part, Channels& o, const Part& older, const Channels& older_o) {
    o.add(part.a, older_o);
    part.a *= older.a;
  }
  struct Total {
    Part part{1.0f, 0.0f};
    float y = 0.0f;
    __device__ void add(const Part& other, float other_y) {
      y += part.a * other_y;
      part.a *= other.a;
    }
  };
  __device__ bool complete(const Total& total) const {
    return total.part.a < p.skip_epsilon;
  }
  __device__ float result(const CachedHead& head, const Total& total, int c) const {
    float y = total.y;
    if (p.remainder_value) y += total.part.a * to_float(head.own_v(p.t)[c]);
    if (p.remainder_bias != nullptr) {
      y += total.part.a * to_float(p.remainder_bias[head.head * p.t.head_dim + c]);
    }
    return y;
  }
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

// What a lane reads of the keys and values of a head.
template <int kLanes, bool kVectors>
class Cached {
 public:
  __device__ Cached(const CachedHead& head, int head_dim)
      : row_bytes_(2 * head.width), head_dim_(head_dim) {
    // Lanes beyond the head's channels read some of these, and find zeros in the query.
    const int channel = kVectors ? min(kHeld * lane(), head_dim - kHeld) : 0;
    k_ = reinterpret_cast<const char*>(head.k + channel);
    v_ = reinterpret_cast<const char*>(head.v + channel);
  }
  // Loads the keys newest, newest - 1, ... of those from `oldest` to `last`. In place of others it
  // loads one of these, if there is any: what it takes to look at each key would cost more.
  template <int kKeys>
  __device__ __forceinline__ void load(int newest, int oldest, int last,
                                       Batch<kKeys>& batch) const {
    if (newest < oldest || last < oldest) return;
#pragma unroll
    for (int b = 0; b < kKeys; ++b) {
      const int i = max(min(newest - b, last), oldest);
      batch.k[b] = row(k_, i);
      batch.v[b] = row(v_, i);
    }
  }
  __device__ const char* k(int i) const {
    return k_ + int64_t{i} * row_bytes_;
  }
  __device__ const char* v(int i) const {
    return v_ + int64_t{i} * row_bytes_;
  }

 private:
  static __device__ int lane() {
    return static_cast<int>(threadIdx.x) % kLanes;
  }
  __device__ Row row(const char* rows, int i) const {
    const char* const at = rows + int64_t{i} * row_bytes_;
    if constexpr (kVectors) return {load_eight(at)};
    return Row::load<false>(reinterpret_cast<const bf16*>(at), head_dim_, lane());
  }
  int row_bytes_;
  int head_dim_;
  const char* k_;
  const char* v_;
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

// All threads of the block call this. Groups of kLanes lanes share a part of the keys; the block
// that comes last adds up the parts.
//
// What earlier steps have cached does not depend on the step that computes the query, nor does the
// length, so a group's first keys are loaded before the kernel in front has ended, after which the
// query is there. While it computes with some, the next ones arrive: twice kKeys are under way, and
// kAhead batches more of the first part, since what is asked for after the wait queues behind the
// weights that the next kernels have asked for.
template <int kLanes, bool kVectors, int kKeys, int kAhead, typename Attention>
__device__ __forceinline__ void attend_cached(const Attention& attention, const Job& job) {
  static_assert(kKeys == kBatch || 2 * kKeys == kBatch);
  constexpr int kGroups = kThreads / kLanes;
  constexpr int kWarps = kThreads / 32;
  using Total = typename Attention::Total;
  __shared__ Part parts[kWarps];
  __shared__ __align__(16) float outputs[kWarps][kHeld * kLanes];
  const Decode& t = attention.p.t;
  const int d = t.head_dim;
  const int group = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int channel = static_cast<int>(threadIdx.x);  // of the sums over warps and parts

  Stamps stamps;
  stamps.take(0);
  const CachedHead head(t, job);
  const Range seen = attention.seen(head);
  const int count = decode_parts(seen.count());
  const auto keys_of = [&](int part) { return seen.part(part, count).part(group, kGroups); };
  const Cached<kLanes, kVectors> cached(head, d);
  Range keys = keys_of(count - 1 - min(job.part, count - 1));
  Batch<kKeys> batch{};
  Batch<kKeys> next{};
  const auto load_first = [&] {
    // The token itself is not in the cache yet.
    const int last = min(keys.end, head.length - 1) - 1;
    cached.load(keys.end - 1, keys.begin, last, batch);
    cached.load(keys.end - 1 - kKeys, keys.begin, last, next);
  };
  load_first();
  const BatchesAhead<kAhead, kKeys> ahead;
  if constexpr (kAhead > 0) ahead.copy(cached, keys, keys.end - 1 - 2 * kKeys);
  wait_for_previous_kernel();
  stamps.take(1);

  // All that the step has computed is asked for at once, before anything waits for it.
  const Row query = Row::load<kVectors>(head.q(t), d, lane);
  if (keys.count() > 0 && keys.end == head.length) {
    batch.k[0] = Row::load<kVectors>(head.own_k(t), d, lane);
    batch.v[0] = Row::load<kVectors>(head.own_v(t), d, lane);
  }
  head.append(t);
  if (job.part >= count) return;
  Channels q = query.channels();
  q.scale(kLog2e * t.scale);
  cp_async_wait<0>();
  stamps.take(2);
  int taken = 0;  // of the batches in shared memory
  Total total;
  for (int i = count - 1 - job.part; i >= 0; i -= job.parts) {
    const int oldest = keys.begin;
    int newest = keys.end - 1;
    if (i < count - 1 - job.part) {
      load_first();
      taken = kAhead;
    }
    typename Attention::template Attend<kLanes> attend(attention, head, lane);
    Channels o;
    // All lanes of a warp take part as long as one of its groups has keys.
    const auto has_keys = [&] { return __any_sync(~0u, newest >= oldest && !attend.complete()); };
    const auto has_half_a_batch = [&] { return __any_sync(~0u, newest >= oldest); };
    const auto add = [&](Batch<kKeys>& of) {
      attend.add(q, of, newest, oldest, o);
      if (taken < kAhead) {
        if (newest - 2 * kKeys >= oldest) ahead.read(taken, of);
        ++taken;
      } else {
        cached.load(newest - 2 * kKeys, oldest, INT_MAX, of);
      }
      newest -= kKeys;
    };
    while (has_keys()) {
      add(batch);
      if (kKeys == kBatch ? !has_keys() : !has_half_a_batch()) break;
      add(next);
    }
    Part part = attend.part;
    stamps.take(3);
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
    if (group % (32 / kLanes) == 32 / kLanes - 1) {
      if (lane == 0) parts[warp] = part;
#pragma unroll
      for (int c = 0; c < kHeld; c += 4) {
        *reinterpret_cast<float4*>(&outputs[warp][kHeld * lane + c]) = {
            o.value[c], o.value[c + 1], o.value[c + 2], o.value[c + 3]};
      }
    }
    __syncthreads();
    stamps.take(4);
    if (count == 1 && 32 * warp >= d) return;  // has no channel
    Total sum;
#pragma unroll
    for (int w = kWarps - 1; w >= 0; --w) {
      sum.add(parts[w], channel < d ? outputs[w][channel] : 0.0f);
    }
    if (count == 1) {
      if (channel < d) {
        head.o(t)[channel] = __float2bfloat16_rn(attention.result(head, sum, channel));
      }
      stamps.take(5);
      if (threadIdx.x == 0) stamps.keep(0, 0);
      return;
    }
    float* const to = head.scratch(t, job.most_parts, i);
    if (channel < d) to[channel] = sum.y;
    if (channel == 0) to[d] = sum.part.a, to[d + 1] = sum.part.b;
    // A block that has the head for itself knows what the newer parts leave.
    total.add(sum.part, 0.0f);
    if (job.parts == 1 && attention.complete(total)) break;
    if (i >= job.parts) keys = keys_of(i - job.parts);
    __syncthreads();  // all have read the sums of the warps
  }
  if (job.parts == 1) {
    __syncthreads();
  } else {
    const int blocks = min(job.parts, count);
    if (!last_to_arrive(t.arrived + head.batch * t.heads + head.head, blocks)) return;
  }
  total = Total();
  for (int i = count - 1; i >= 0 && !attention.complete(total); --i) {
    const float* const from = head.scratch(t, job.most_parts, i);
    total.add({__ldcg(from + d), __ldcg(from + d + 1)},
              channel < d ? __ldcg(from + channel) : 0.0f);
  }
  if (channel < d) {
    head.o(t)[channel] = __float2bfloat16_rn(attention.result(head, total, channel));
  }
}

// Of one head of one sequence.
int64_t blocks_of_head(const Decode& t) {
  const int64_t heads = t.batch * t.heads;
  return heads >= kDecodeBlocks ? 1 : std::min(kDecodeBlocks / heads, decode_parts(t.capacity));
}
bool has_vectors(const Decode& t) {
  const Matrix<const bf16> cache{t.k_cache, int64_t{t.key_heads} * t.head_dim};
  return t.head_dim % kHeld == 0 &&
         vectors_fit<kHeld>(cache, Matrix<const bf16>{t.v_cache, 0}, t.q, t.k, t.v);
}

constexpr int64_t kManyBlocks = 264;  // two for each multiprocessor of an H200
// Up to this many leave most of the shared memory to the weights of the kernels that follow.
constexpr int64_t kFewBlocks = 64;

enum class Blocks { kFew, kSome, kMany };
constexpr int keys_at_once(Blocks blocks) {
  return blocks == Blocks::kMany ? kBatch / 2 : kBatch;
}
// With the two batches in registers they make the 16 keys of a group of a part of 512.
constexpr int batches_ahead(Blocks blocks) {
  return blocks == Blocks::kFew ? 2 : 0;
}

// Block (h, b, z) computes head h of sequence b, together with the other blocks of that head.
template <int kLanes, bool kVectors, Blocks kBlocks, typename Attention>
__global__ void __launch_bounds__(kThreads, kBlocks == Blocks::kMany ? 3 : 2)
    decode_kernel(const __grid_constant__ Attention attention, int most_parts) {
  let_next_kernel_begin();
  attend_cached<kLanes, kVectors, keys_at_once(kBlocks), batches_ahead(kBlocks)>(
      attention, {static_cast<int>(blockIdx.x), blockIdx.y, attention.p.t.lengths[blockIdx.y],
                  static_cast<int>(blockIdx.z), static_cast<int>(gridDim.z), most_parts});
}

template <int kLanes, typename Attention>
void launch(const char* name, cudaStream_t stream, const Attention& attention) {
  const Decode& t = attention.p.t;
  const dim3 grid(static_cast<unsigned>(t.heads), static_cast<unsigned>(t.batch),
                  static_cast<unsigned>(blocks_of_head(t)));
  const auto launch_kernel = [&](auto kernel, size_t shared_bytes) {
    launch_early(name, t.early, stream, kernel, {grid, kThreads, shared_bytes}, attention,
                 static_cast<int>(decode_parts(t.capacity)));
  };
  // While there are few blocks, each of them has many keys under way; many blocks have more of them
  // on a multiprocessor instead.
  const int64_t blocks = t.heads * t.batch;
  if (!has_vectors(t)) {
    launch_kernel(decode_kernel<kLanes, false, Blocks::kSome, Attention>, 0);
  } else if (blocks > kManyBlocks) {
    launch_kernel(decode_kernel<kLanes, true, Blocks::kMany, Attention>, 0);
  } else if (blocks * blocks_of_head(t) > kFewBlocks) {
    launch_kernel(decode_kernel<kLanes, true, Blocks::kSome, Attention>, 0);
  } else {
    launch_kernel(decode_kernel<kLanes, true, Blocks::kFew, Attention>,
                  BatchesAhead<batches_ahead(Blocks::kFew), kBatch>::bytes());
  }
}

// With the fewest lanes that hold one head.
template <typename Attention>
void decode(const char* name, cudaStream_t stream, const Attention& attention) {
  const Decode& t = attention.p.t;
  write_stamps_at_exit("attention");
  if (t.head_dim > kMaxDecodeHeadDim) {
    throw std::invalid_argument(std::string(name) + ": heads of " + std::to_string(t.head_dim) +
                                " channels, at most " + std::to_string(kMaxDecodeHeadDim));
  }
  if (t.batch == 0 || t.heads == 0) return;
  if (t.head_dim <= 32) return launch<4>(name, stream, attention);
  if (t.head_dim <= 64) return launch<8>(name, stream, attention);
  if (t.head_dim <= 128) return launch<16>(name, stream, attention);
  launch<32>(name, stream, attention);
}

}  // namespace

void cache_append(cudaStream_t stream, const CacheAppend& p) {
  p.type == Type::kF32 ? append<float>(stream, p) : append<bf16>(stream, p);
}

void softmax_decode(cudaStream_t stream, const SoftmaxDecode& p) {
  decode("softmax_decode", stream, Softmax<NoBias>{p, {}});
}

void alibi_decode(cudaStream_t stream, const SoftmaxDecode& p, const AlibiSlopes& slopes) {
  decode("alibi_decode", stream, Softmax<AlibiBias>{p, {slopes}});
}

void fire_decode(cudaStream_t stream, const SoftmaxDecode& p, const FireParameters& parameters) {
  decode("fire_decode", stream, Softmax<FireBias>{p, {parameters}});
}

void stickbreaking_decode(cudaStream_t stream, const StickBreakingDecode& p) {
  decode("stickbreaking_decode", stream, StickBreaking{p});
}

}  // namespace sbtrain::kernels
