// An attention module by itself: a small model, the parameters of a module, a pack of documents.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/registry.h"
#include "support/tensors.h"

namespace sbtrain::test {

inline ModelConfig small_model(int64_t heads) {
  ModelConfig model;
  model.width = 12;
  model.heads = heads;
  model.init_std = 0.4;
  return model;
}

// The parameters of a module, stored one after the other as fused ones must be; all zero, or
// random.
struct Parameters {
  Parameters(const ::sbtrain::Attention& module, bool random)
      : Parameters(all_of(module), random) {}
  Parameters(std::vector<TensorSpec> all, bool random) : specs(std::move(all)) {
    int64_t total = 0;
    for (const TensorSpec& spec : specs) total += Tensor(nullptr, DType::kF32, spec.shape).numel();
    storage.resize(static_cast<size_t>(total));
    int64_t offset = 0;
    for (const TensorSpec& spec : specs) {
      const Tensor tensor(storage.data() + offset, DType::kF32, spec.shape);
      weights.add(spec.name, tensor);
      const bool normal = spec.init.kind == Init::Kind::kNormal;
      const Owned values =
          random_normal(spec.name, {tensor.numel()}, normal ? spec.init.value : 0.3,
                        normal ? 0.0 : spec.init.value);
      for (int64_t i = 0; random && i < tensor.numel(); ++i) {
        storage[static_cast<size_t>(offset + i)] = values.f32()[i];
      }
      offset += tensor.numel();
    }
  }
  static std::vector<TensorSpec> all_of(const ::sbtrain::Attention& module) {
    std::vector<TensorSpec> all = module.parameters();
    for (const TensorSpec& spec : module.shared_parameters()) all.push_back(spec);
    return all;
  }
  HostWeights on_host() const {
    HostWeights host;
    for (const TensorSpec& spec : specs) {
      const Tensor tensor = weights.at(spec.name);
      HostMatrix matrix(spec.shape.size() > 1 ? spec.shape[0] : 1, spec.shape.back());
      matrix.values = to_f64(tensor);
      host.emplace(spec.name, std::move(matrix));
    }
    return host;
  }
  std::vector<TensorSpec> specs;
  std::vector<float> storage;
  Weights weights;
};

// Documents of these lengths, one after the other.
struct Pack {
  explicit Pack(std::vector<int32_t> of) : lengths(std::move(of)), bounds(integers(ends())) {
    std::vector<int32_t> positions_of_tokens;
    for (const int32_t length : lengths) {
      for (int32_t i = 0; i < length; ++i) positions_of_tokens.push_back(i);
    }
    tokens = static_cast<int64_t>(positions_of_tokens.size());
    positions = std::make_unique<Owned>(integers(positions_of_tokens));
  }
  std::vector<int32_t> ends() const {
    std::vector<int32_t> bounds = {0};
    for (const int32_t length : lengths) bounds.push_back(bounds.back() + length);
    return bounds;
  }
  Sequences sequences() const {
    return {.cu_seqlens = bounds,
            .positions_T = *positions,
            .count = static_cast<int64_t>(lengths.size()),
            .max_seqlen = *std::ranges::max_element(lengths)};
  }
  std::vector<int32_t> lengths;
  Owned bounds;
  std::unique_ptr<Owned> positions;
  int64_t tokens = 0;
};

}  // namespace sbtrain::test
