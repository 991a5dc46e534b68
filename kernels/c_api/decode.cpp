// Decoding behind the C interface.
#include "kernels/decode.h"

#include "kernels/attention/alibi_slopes.h"
#include "kernels/c_api/problem.h"
#include "kernels/device_attribute.h"

namespace sbtrain::c_api {
namespace {

// Counters for GPUs of any size, so that workspace is planned without one: 4 of each
// multiprocessor.
constexpr int64_t kCounters = kernels::decode_blocks(1024);

struct Scratch {
  Scratch(const sbtrain_decode& x, Workspace& workspace)
      : arrived(workspace.take<int32_t>(kCounters)),
        parts(workspace.take<float>(
            kernels::decode_scratch_floats(x.batch, x.heads, x.head_dim, x.capacity))) {}
  int32_t* arrived;
  float* parts;
};

void check(const sbtrain_decode& x) {
  check_heads(x);
  require_field(x.head_dim <= kernels::kMaxDecodeHeadDim, "head_dim", x.head_dim, "at most 256");
  require_field(x.batch >= 0 && x.batch <= 65535, "batch", x.batch, "from 0 to 65535");
  require_field(x.capacity > 0 && x.capacity <= INT_MAX / 2, "capacity", x.capacity,
                "from 1 to 2^30");
  check_bias(x);
  require_field(x.skip_epsilon >= 0.0f && x.skip_epsilon < 1.0f, "skip_epsilon", x.skip_epsilon,
                "from 0 to below 1");
}

void check_tensors_of(const sbtrain_decode& x) {
  const int64_t columns = int64_t{kv_heads(x)} * x.head_dim;
  check_rows("q", x.q, int64_t{x.heads} * x.head_dim);
  check_rows("o", x.o, int64_t{x.heads} * x.head_dim);
  if ((x.k.data == nullptr) != (x.v.data == nullptr)) invalid("one of k and v is null");
  if (x.k.data != nullptr) {
    check_rows("k", x.k, columns);
    check_rows("v", x.v, columns);
  }
  check_pointer("k_cache", x.k_cache);
  check_pointer("v_cache", x.v_cache);
  check_pointer("lengths", x.lengths);
}

kernels::Decode parameters(const sbtrain_decode& x, const Scratch& scratch) {
  const auto read = [](const sbtrain_rows& rows) {
    return kernels::Matrix<const bf16>{static_cast<const bf16*>(rows.data), rows.stride};
  };
  return {.o = head_rows(x.o),
          .q = read(x.q),
          .k = read(x.k),
          .v = read(x.v),
          .k_cache = static_cast<bf16*>(x.k_cache),
          .v_cache = static_cast<bf16*>(x.v_cache),
          .lengths = x.lengths,
          .batch = x.batch,
          .capacity = x.capacity,
          .heads = x.heads,
          .key_heads = kv_heads(x),
          .head_dim = x.head_dim,
          .scale = x.scale,
          .scratch = scratch.parts,
          .arrived = scratch.arrived,
          .early = false};
}

template <typename Launch>
void run(const sbtrain_decode& x, const Launch& launch) {
  device_of(x.device, 0);
  check(x);
  if (x.batch == 0) return;
  check_tensors_of(x);
  Workspace workspace(x.workspace);
  const Scratch scratch(x, workspace);
  require_workspace(x.workspace, x.workspace_bytes, workspace.bytes());
  const CurrentDevice current(x.device);
  auto* const stream = static_cast<cudaStream_t>(x.stream);
  const int64_t counters = kernels::decode_blocks(kernels::multiprocessors());
  if (counters > kCounters) unsupported("GPUs of more than 1024 multiprocessors");
  kernels::check_cuda(
      "decode", cudaMemsetAsync(scratch.arrived, 0, static_cast<size_t>(counters) * 4, stream));
  launch(stream, parameters(x, scratch));
}

void run_stickbreaking(const sbtrain_decode& x) {
  check_remainder(x.remainder, x.remainder_vector);
  const bool vector = x.remainder == SBTRAIN_REMAINDER_VECTOR;
  run(x, [&](cudaStream_t stream, const kernels::Decode& t) {
    kernels::stickbreaking_decode(
        stream, {.t = t,
                 .gate_cache = x.gate_cache,
                 .remainder_bias = vector ? static_cast<const bf16*>(x.remainder_vector) : nullptr,
                 .remainder_value = x.remainder == SBTRAIN_REMAINDER_VALUE,
                 .attend_current = x.attend_current != 0,
                 .skip_epsilon = x.skip_epsilon});
  });
}

void run_softmax(const sbtrain_decode& x) {
  run(x, [&](cudaStream_t stream, const kernels::Decode& t) {
    const kernels::SoftmaxDecode p{t, x.window};
    if (x.bias == SBTRAIN_BIAS_NONE) kernels::softmax_decode(stream, p);
    if (x.bias == SBTRAIN_BIAS_ALIBI) {
      kernels::softmax_decode(stream, p, kernels::alibi_slopes(x.heads));
    }
    if (x.bias == SBTRAIN_BIAS_FIRE) kernels::softmax_decode(stream, p, fire_parameters(x.fire));
  });
}

}  // namespace
}  // namespace sbtrain::c_api

using namespace sbtrain::c_api;

int sbtrain_decode_workspace(const sbtrain_decode* x, uint64_t* bytes) {
  return call([&] {
    check_pointer("bytes", bytes);
    const sbtrain_decode y = take(x);
    check(y);
    Workspace workspace;
    const Scratch scratch(y, workspace);
    *bytes = workspace.bytes();
  });
}
int sbtrain_stickbreaking_decode(const sbtrain_decode* x) {
  return call([&] { run_stickbreaking(take(x)); });
}
int sbtrain_softmax_decode(const sbtrain_decode* x) {
  return call([&] { run_softmax(take(x)); });
}
