// Times attention forward and backward, without the rest of the model.
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "attention/registry.h"
#include "bench/bench.h"
#include "bench/timing.h"
#include "config/schema.h"
#include "core/error.h"
#include "core/philox.h"

namespace sbtrain {
namespace {

struct Case {
  AttentionConfig attention;
  ModelConfig model;
  std::vector<int64_t> documents;  // their lengths
  int64_t repeats;
};

// Lengths of documents that fill `tokens`: all the same or, if `ragged`, drawn from a log-normal
// distribution of that mean whose logarithms have a standard deviation of 1; the last is cut.
std::vector<int64_t> document_lengths(int64_t tokens, int64_t length, bool ragged) {
  const Philox philox(1, RandomPurpose::kTest, "lengths of documents");
  std::vector<int64_t> lengths;
  for (int64_t left = tokens; left > 0; left -= lengths.back()) {
    const double drawn =
        static_cast<double>(length) * std::exp(philox.normal(lengths.size()) - 0.5);
    const auto next = ragged ? static_cast<int64_t>(std::max(1.0, std::round(drawn))) : length;
    lengths.push_back(std::min(next, left));
  }
  return lengths;
}

// Documents that fill the micro-batch.
struct Documents {
  Documents(RandomTensors& random, const std::vector<int64_t>& lengths) {
    std::vector<int32_t> position_of, begins = {0};
    for (const int64_t length : lengths) {
      for (int64_t t = 0; t < length; ++t) position_of.push_back(static_cast<int32_t>(t));
      begins.push_back(static_cast<int32_t>(position_of.size()));
    }
    positions = random.integers(position_of);
    cu_seqlens = random.integers(begins);
    sequences = {.cu_seqlens = cu_seqlens,
                 .positions_T = positions,
                 .count = static_cast<int64_t>(lengths.size()),
                 .max_seqlen = *std::ranges::max_element(lengths)};
  }
  Buffer positions, cu_seqlens;
  Sequences sequences;
};

// A module's parameters, scaled so that projections have a variance of 1.
class Parameters {
 public:
  Parameters(RandomTensors& random, const Attention& module) {
    std::vector<TensorSpec> specs = module.parameters();
    for (const TensorSpec& spec : module.shared_parameters()) specs.push_back(spec);
    for (size_t i = 0; i < specs.size();) {
      size_t end = i + 1;  // the end of the tensors that are stored one after the other
      while (end < specs.size() && specs[end].fused) ++end;
      add(random, specs, i, end);
      i = end;
    }
  }
  Weights weights, gradients;

 private:
  static Tensor shaped(const Tensor& rows, const std::vector<int64_t>& shape) {
    return {rows.data, rows.dtype, shape};
  }
  void add(RandomTensors& random, const std::vector<TensorSpec>& specs, size_t begin, size_t end) {
    const TensorSpec& first = specs[begin];
    const int64_t cols = first.shape.size() > 1 ? first.shape[1] : 1;
    int64_t rows = 0;
    for (size_t i = begin; i < end; ++i) rows += specs[i].shape[0];
    const bool normal = first.init.kind == Init::Kind::kNormal;
    const auto value = static_cast<float>(first.init.value);
    const float std = cols > 1 ? 1.0f / std::sqrt(static_cast<float>(cols)) : value;
    buffers_.push_back(normal ? random.normal(random.compute(), {rows, cols}, std)
                              : random.constant(random.compute(), {rows, cols}, value));
    const Tensor weight = buffers_.back();
    buffers_.push_back(random.constant(DType::kF32, {rows, cols}, 0.0f));
    const Tensor gradient = buffers_.back();
    int64_t row = 0;
    for (size_t i = begin; i < end; ++i) {
      const int64_t count = specs[i].shape[0];
      weights.add(specs[i].name, shaped(weight.row_range(row, count), specs[i].shape));
      gradients.add(specs[i].name, shaped(gradient.row_range(row, count), specs[i].shape));
      row += count;
    }
  }
  Tensors buffers_;
};

// Times the ops of a module that are not matrix products, forward or backward. Every set of tensors
// has been through a forward pass, since the backward pass needs its results.
class ModuleBench {
 public:
  ModuleBench(Stream& s, RandomTensors& random, const Case& c)
      : stream_(s),
        module_(make_attention(c.attention, c.model)),
        tokens_(total(c.documents)),
        documents_(random, c.documents),
        parameters_(random, *module_),
        rotation_([&] {
          const int64_t mix = module_->mix_width(c.model.width);
          const DType real = random.compute();
          saved_.push_back(module_->allocate(s.memory(), tokens_));
          return tensors(random.normal(real, {tokens_, c.model.width}),
                         random.empty(real, {tokens_, c.model.width}),
                         random.empty(real, {tokens_, mix}), random.normal(real, {tokens_, mix}));
        }),
        repeats_(c.repeats) {}

  double forward_seconds() {
    return seconds([&](const Tensors& x, AttentionSaved& saved) {
      module_->forward(stream_, x[kMix], x[kX], parameters_.weights, saved, documents_.sequences);
    });
  }
  double backward_seconds() {
    return seconds([&](const Tensors& x, AttentionSaved& saved) {
      module_->backward(stream_, x[kDx], parameters_.gradients, x[kDmix], x[kMix], x[kX],
                        parameters_.weights, saved, documents_.sequences);
    });
  }
  const Attention& module() const { return *module_; }

 private:
  enum : size_t { kX, kDx, kMix, kDmix };

  static int64_t total(const std::vector<int64_t>& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  }

  template <typename Call>
  double seconds(const Call& call) {
    const auto run = [&](int64_t n) {
      call(rotation_.at(n), *saved_[static_cast<size_t>(n % rotation_.count())]);
    };
    for (int64_t n = 0; n < rotation_.count(); ++n) run(n);
    const OpProfile profile = profile_of(stream_, repeats_, run);
    double sum = 0;
    for (const auto& [op, entry] : profile.entries()) {
      if (is_matrix_product(op)) continue;
      const auto calls = static_cast<double>(entry.calls.size()) / static_cast<double>(repeats_);
      sum += calls * median(entry.calls);
    }
    return sum;
  }

  Stream& stream_;
  std::unique_ptr<Attention> module_;
  int64_t tokens_;
  Documents documents_;
  Parameters parameters_;
  std::vector<std::unique_ptr<AttentionSaved>> saved_;  // one for each set
  Rotation rotation_;
  int64_t repeats_;
};

// Each visible pair of query and key needs two products of head_dim: 4 d L^2 / 2 for each head and
// document without a window. The count is the same for every module, so the rates compare modules;
// they do not tell how busy a device is.
double pair_flops(const Attention& module, int64_t width, int64_t length) {
  double keys = 0;
  for (int64_t j = 0; j < length; ++j) keys += module.seen_keys(static_cast<double>(j) + 0.5);
  return 4.0 * static_cast<double>(width) * keys;
}

const AttentionBenchCase& bench_case(const std::string& name) {
  for (const AttentionModule& module : attention_registry().modules()) {
    for (const AttentionBenchCase& c : module.bench) {
      if (c.name == name) return c;
    }
  }
  fail(ExitCode::kUsage, "'{}' is not one of {}", name, fmt::join(bench_attention_modules(), ", "));
}

// The case's module with the options that the case sets. An option that `changes` contains has the
// value given there.
AttentionConfig configure(const std::string& name,
                          const std::map<std::string, std::string>& changes) {
  const AttentionBenchCase& c = bench_case(name);
  std::map<std::string, std::string> options = c.options;
  for (auto& [key, value] : options) {
    const auto change = changes.find(key);
    if (change != changes.end()) value = change->second;
  }
  std::string text = "type: " + c.type + "\n";
  for (const auto& [key, value] : options) text += fmt::format("{}: {}\n", key, value);
  return parse_attention(text);
}

void complete(AttentionBenchOptions& o, bool cuda) {
  if (o.tokens == 0) o.tokens = cuda ? 32768 : 1024;
  if (o.width == 0) o.width = cuda ? 1536 : 128;
  if (o.head_dims.empty()) o.head_dims = {32, 64, 128};
  if (o.lengths.empty()) {
    for (int64_t length = cuda ? 512 : 256; length <= (cuda ? 16384 : 1024); length *= 2) {
      o.lengths.push_back(length);
    }
  }
  if (o.modules.empty()) {
    o.modules = bench_attention_modules();
    o.modules.resize(2);
  }
  for (const auto& option : o.options) {
    const std::string& key = option.first;
    const auto states = [&](const std::string& name) {
      return bench_case(name).options.contains(key);
    };
    if (std::ranges::none_of(o.modules, states)) {
      fail(ExitCode::kUsage, "--options: none of {} is timed with an option '{}'",
           fmt::join(o.modules, ", "), key);
    }
  }
  for (const int64_t d : o.head_dims) {
    if (o.width % d != 0)
      fail(ExitCode::kUsage, "heads of {} do not divide a width of {}", d, o.width);
  }
  for (const int64_t length : o.lengths) {
    if (!o.ragged && o.tokens % length != 0) {
      fail(ExitCode::kUsage, "documents of {} do not divide {} tokens", length, o.tokens);
    }
  }
}

}  // namespace

std::vector<std::string> bench_attention_modules() {
  std::vector<std::string> names;
  for (const AttentionModule& module : attention_registry().modules()) {
    for (const AttentionBenchCase& c : module.bench) names.push_back(c.name);
  }
  return names;
}

std::vector<AttentionBenchRow> bench_attention(Backend backend, AttentionBenchOptions options) {
  if (!options.implementation.empty() && backend != Backend::kCuda) {
    fail(ExitCode::kUsage, "--implementation {}: only a GPU has several; here is the CPU",
         options.implementation);
  }
  complete(options, backend == Backend::kCuda);
  // Positions and the limits of documents, 4 bytes each; q, k, v and the projections' matrices.
  require_sizes(backend, 8 * options.tokens, {options.tokens, 3 * options.width},
                {3 * options.width, options.width});
  Memory memory(backend);
  Stream stream(memory);
  stream.set_deterministic(options.deterministic);
  stream.set_implementation(options.implementation);
  RandomTensors random(stream);
  std::vector<AttentionBenchRow> rows;
  for (const std::string& module : options.modules) {
    for (const int64_t d : options.head_dims) {
      for (const int64_t length : options.lengths) {
        Case c{.attention = configure(module, options.options),
               .model = {},
               .documents = document_lengths(options.tokens, length, options.ragged),
               .repeats = options.repeats};
        c.model.width = options.width;
        c.model.heads = options.width / d;
        ModuleBench bench(stream, random, c);
        AttentionBenchRow row;
        row.module = module;
        row.head_dim = d;
        row.length = length;
        row.forward_seconds = bench.forward_seconds();
        row.backward_seconds = bench.backward_seconds();
        for (const int64_t document : c.documents) {
          row.forward_flops += pair_flops(bench.module(), options.width, document);
        }
        row.backward_flops = 2.5 * row.forward_flops;
        rows.push_back(std::move(row));
      }
    }
  }
  return rows;
}

}  // namespace sbtrain
