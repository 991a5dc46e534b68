#include "ops/optimizer.h"

#include "ops/cuda/context.h"
#include "ops/memory.h"
#include "ops/run.h"

namespace sbtrain::ops::cuda {
namespace {

// Collects ranges for a launch of AdamW, which takes a limited number of ranges and of their parts
// with decay.
class AdamWLaunch {
 public:
  explicit AdamWLaunch(Stream& s) : stream_(s) {}

  // Elements [begin, end), which contain the parts with decay.
  void add(const AdamW& op, int64_t begin, int64_t end, std::span<const DecayRange> decays) {
    if (p_.part_count == kernels::kMaxAdamWParts ||
        segments_ + static_cast<int>(decays.size()) > kernels::kMaxDecaySegments) {
      launch();
    }
    const auto from = [&](const Tensor& t) { return t.f32() + begin; };
    const bool copies = op.compute_N.defined() && op.compute_N.dtype == DType::kBF16;
    kernels::bf16* const compute = copies ? op.compute_N : Tensor();
    p_.stats = op.stats;
    p_.lr = op.lr;
    p_.beta1 = op.beta1;
    p_.beta2 = op.beta2;
    p_.eps = op.eps;
    kernels::AdamWPart& part = p_.parts[p_.part_count++];
    part = {.w = from(op.w_N),
            .m = from(op.m_N),
            .v = from(op.v_N),
            .grad = from(op.grad_N),
            .w_bf16 = copies ? compute + begin : nullptr,
            .n = end - begin,
            .first_segment = segments_,
            .end_segment = segments_};
    for (const DecayRange& range : decays) {
      p_.segments[part.end_segment++] = {range.begin - begin, range.end - begin, op.decay};
    }
    segments_ = part.end_segment;
  }
  void launch() {
    if (p_.part_count > 0) kernels::launch(cuda_stream(stream_), p_);
    p_ = {};
    segments_ = 0;
  }

 private:
  Stream& stream_;
  kernels::AdamW p_{};
  int segments_ = 0;
};

}  // namespace

void run(Cuda, Stream& s, const AddSquaredNorms& op, const Buffer& scratch) {
  const auto vectors = [](const Tensor& x) {
    return x.numel() % 4 == 0 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
  };
  kernels::SquaredNorms p{.out = op.y_1, .count = 0, .x = {}, .n = {}, .scratch = scratch.tensor()};
  const auto launch = [&] {
    kernels::launch(cuda_stream(s), p);
    p.count = 0;
  };
  for (const Tensor& x : op.x) {
    if (p.count == kernels::kMaxNormParts || !vectors(x)) launch();
    if (!vectors(x)) {
      run(Cuda(), s, AddSquaredNorm{.y_1 = op.y_1, .x = x}, scratch);
      continue;
    }
    p.x[p.count] = x.f32();
    p.n[p.count++] = x.numel();
  }
  launch();
}

void run(Cuda, Stream& s, const AdamWs& op) {
  AdamWLaunch launch(s);
  for (const AdamW& range : op.ranges) {
    std::span<const DecayRange> left = range.decays;
    int64_t begin = 0;
    // What begins in the middle of a range may lie badly for vectors, so it has its own launches.
    const bool split = left.size() > kernels::kMaxDecaySegments;
    if (split) launch.launch();
    while (left.size() > kernels::kMaxDecaySegments) {
      const auto some = left.first(kernels::kMaxDecaySegments);
      launch.add(range, begin, some.back().end, some);
      begin = some.back().end;
      left = left.subspan(some.size());
      launch.launch();
    }
    launch.add(range, begin, range.w_N.numel(), left);
    if (split) launch.launch();
  }
  launch.launch();
  for (const AdamW& range : op.ranges) {
    if (range.compute_N.defined() && range.compute_N.dtype == DType::kF32) {
      run(Cuda(), s, Copy{.y = range.compute_N, .x = range.w_N});
    }
  }
}

void run(Cuda, Stream& s, const AdamW& op) {
  run(Cuda(), s, AdamWs{.ranges = {&op, 1}});
}

}  // namespace sbtrain::ops::cuda
