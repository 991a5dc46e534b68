// Times collectives, alone and beside the matrix products of another stream.
#include <algorithm>

#include "bench/bench.h"
#include "bench/timing.h"
#include "core/error.h"
#include "ops/linear.h"
#include "ops/memory.h"
#include "ops/stream_control.h"
#include "parallel/make_communicator.h"
#include "parallel/network.h"

namespace sbtrain {
namespace {

struct CollectiveCase {
  Collective collective;
  DType dtype;
};
// What training moves: weights in the compute type, gradients in f32 or bf16.
constexpr CollectiveCase kCases[] = {
    {Collective::kAllGather, DType::kBF16},     {Collective::kReduceScatter, DType::kF32},
    {Collective::kReduceScatter, DType::kBF16}, {Collective::kAllToAll, DType::kF32},
    {Collective::kAllReduce, DType::kF32},      {Collective::kBroadcast, DType::kBF16}};

struct Setting {
  std::string name;
  CommunicatorOptions options;
};

class CollectivesBench {
 public:
  CollectivesBench(Control& control, Backend backend, const CollectivesBenchOptions& options)
      : control_(control),
        backend_(backend),
        options_(options),
        memory_(backend),
        compute_(memory_),
        communication_(memory_, "communication", StreamPriority::kHigh) {
    for (Stream* s : {&compute_, &communication_}) {
      ops::control(*s).check_after_waits([&control] { control.check(); });
    }
    if (backend_ == Backend::kCuda) prepare_products();
  }

  std::vector<CollectivesBenchRow> run() {
    for (const Setting& setting : settings()) {
      const auto ranks = make_communicator(control_, backend_, setting.options);
      for (const int64_t mebibytes : options_.mebibytes) {
        for (const CollectiveCase& c : kCases) {
          // The copy engines do nothing but copy.
          const bool copies =
              c.collective == Collective::kAllGather || c.collective == Collective::kAllToAll;
          if (setting.options.copy_engines && !copies) continue;
          control_.progress("timing collectives");
          rows_.push_back(row(*ranks, setting, c, mebibytes << 20));
        }
      }
    }
    return std::move(rows_);
  }

 private:
  static constexpr int64_t kTokens = 16384;
  static constexpr int64_t kWidth = 4096;
  static constexpr int64_t kFirst = 8;  // products that start before a collective does

  std::vector<Setting> settings() const {
    std::vector<Setting> all;
    for (const int64_t ctas : options_.ctas) {
      all.push_back({ctas == 0 ? "default" : fmt::format("{} CTAs", ctas),
                     {.max_ctas = static_cast<int>(ctas)}});
    }
    if (options_.copy_engines) all.push_back({"copy engines", {.copy_engines = true}});
    return all;
  }

  void prepare_products() {
    RandomTensors random(compute_);
    x_ = random.normal(random.compute(), {kTokens, kWidth});
    w_ = random.normal(random.compute(), {kWidth, kWidth});
    y_ = random.empty(random.compute(), {kTokens, kWidth});
    ops::begin_tuning(compute_, "");
    product();
    ops::end_tuning(compute_);
    product_seconds_ = median(times_of_products(50, [] {}));
  }

  void product() { ops::run(compute_, ops::Linear{.y_TN = y_, .x_TK = x_, .w_NK = w_}); }

  // Runs products, with `beside` started while they run; the times of all but the first ones.
  template <typename Beside>
  std::vector<double> times_of_products(int64_t count, Beside beside) {
    OpProfile profile;
    compute_.set_profile(&profile);
    Event begun;
    for (int64_t n = 0; n < kFirst + count; ++n) {
      if (n == kFirst) compute_.record(begun);
      product();
    }
    communication_.wait(begun);
    beside();
    ops::run(communication_, ops::Synchronize{});
    ops::run(compute_, ops::Synchronize{});
    compute_.set_profile(nullptr);
    const std::vector<double>& calls = profile.entries().find(ops::Linear::kName)->second.calls;
    return {calls.begin() + kFirst, calls.end()};
  }

  CollectivesBenchRow row(Communicator& ranks, const Setting& setting, const CollectiveCase& c,
                          int64_t bytes) {
    const int W = ranks.world();
    const auto size = static_cast<int64_t>(dtype_size(c.dtype));
    const int64_t n = bytes / size / W;
    const auto memory = collective_memory(backend_, static_cast<size_t>(2 * n * W * size));
    if (!memory) {
      fail(ExitCode::kOutOfMemory, "out of memory: {} bytes for collectives", 2 * n * W * size);
    }
    const Tensor both(memory.get(), c.dtype, {2, n * W});
    const Tensor full = both.row_range(0, 1).reshaped({n * W});
    const Tensor other = both.row_range(1, 1).reshaped({n * W});
    const Tensor shard = full.row_range(n * ranks.rank(), n);
    ops::run(communication_, ops::Fill{.x = both, .value = 1e-30f});  // stays finite when added
    const std::shared_ptr<void> registered = ranks.register_memory(both);
    const auto call = [&] { start(ranks, c.collective, full, shard, other); };
    for (int i = 0; i < 3; ++i) call();
    CollectivesBenchRow result{.collective = c.collective,
                               .dtype = c.dtype,
                               .setting = setting.name,
                               .bytes = static_cast<double>(full.bytes()),
                               .bus_factor = ring_share(c.collective, W)};
    result.seconds = times(ranks, c.collective, [&] {
      for (int64_t i = 0; i < options_.repeats; ++i) call();
      ops::run(communication_, ops::Synchronize{});
    });
    if (backend_ == Backend::kCuda) measure_beside(ranks, call, result);
    return result;
  }

  // A collective beside products takes several times as long as alone, so there are products for
  // six times as long; the first sixth of them certainly runs beside collectives.
  template <typename Call>
  void measure_beside(Communicator& ranks, const Call& call, CollectivesBenchRow& result) {
    const double alone = result.seconds * static_cast<double>(options_.repeats);
    const auto count =
        std::clamp<int64_t>(static_cast<int64_t>(6 * alone / product_seconds_), 24, 600);
    std::vector<double> products;
    result.beside_seconds = times(ranks, result.collective, [&] {
      products = times_of_products(count, [&] {
        for (int64_t i = 0; i < options_.repeats; ++i) call();
      });
    });
    products.resize(static_cast<size_t>(count / 6));
    result.products_slowdown = mean(ranks, median(products)) / mean(ranks, product_seconds_);
  }

  // The median of the collectives that `work` starts on the communication stream.
  template <typename Work>
  double times(Communicator& ranks, Collective collective, const Work& work) {
    ops::run(communication_, ops::Synchronize{});
    ranks.barrier();
    OpProfile profile;
    communication_.set_profile(&profile);
    work();
    communication_.set_profile(nullptr);
    return mean(ranks, median(profile.entries().find(collective_name(collective))->second.calls));
  }

  static double mean(Communicator& ranks, double value) {
    ranks.sum({&value, 1});
    return value / ranks.world();
  }

  void start(Communicator& ranks, Collective collective, const Tensor& full, const Tensor& shard,
             const Tensor& other) {
    Stream& s = communication_;
    switch (collective) {
      case Collective::kAllGather:
        return ranks.all_gather(s, full, shard);
      case Collective::kReduceScatter:
        return ranks.reduce_scatter(s, shard, full);
      case Collective::kAllToAll:
        return ranks.all_to_all(s, other, full);
      case Collective::kShift:
        return ranks.shift(s, other, full, 1);
      case Collective::kAllReduce:
        return ranks.all_reduce(s, full);
      case Collective::kBroadcast:
        return ranks.broadcast(s, full, 0);
    }
  }

  Control& control_;
  Backend backend_;
  const CollectivesBenchOptions& options_;
  Memory memory_;
  Stream compute_;
  Stream communication_;
  Buffer x_, w_, y_;
  double product_seconds_ = 0;  // alone
  std::vector<CollectivesBenchRow> rows_;
};

}  // namespace

std::vector<CollectivesBenchRow> bench_collectives(Control& control, Backend backend,
                                                   CollectivesBenchOptions options) {
  if (options.mebibytes.empty()) {
    options.mebibytes = backend == Backend::kCuda ? std::vector<int64_t>{1, 8, 56, 112, 256}
                                                  : std::vector<int64_t>{1, 8, 32};
  }
  return CollectivesBench(control, backend, options).run();
}

}  // namespace sbtrain
