// A small model of random weights, for tests of what continues sequences with it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/schema.h"
#include "core/philox.h"
#include "serve/decode_batch.h"
#include "support/model.h"

namespace sbtrain::test {

inline constexpr int64_t kVocab = 61;

// `attention`: one layer for each. No width is a multiple of what vector instructions take.
inline ModelConfig small_config(const std::vector<std::string>& attention) {
  ModelConfig config;
  config.layers = static_cast<int64_t>(attention.size());
  config.width = 36;
  config.inner = 44;
  config.heads = 3;
  config.vocab = kVocab;
  config.init_std = 0.4;  // so that the likeliest tokens differ from one position to the next
  config.attention.clear();
  for (const std::string& layer : attention) config.attention.push_back(parse_attention(layer));
  return config;
}

// Every kind of cache: keys and values, a gate, a state, the last inputs.
inline const std::vector<std::string> kAllCaches = {
    "{type: stickbreaking, remainder: value, forget_gate: true, head_norm: true}",
    "{type: softmax, position: rope}", "{type: rebased}", "{type: short_conv}"};

inline std::vector<int32_t> random_prompt(int64_t length, uint64_t seed) {
  const Philox random(seed, RandomPurpose::kTest, "prompt");
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < length; ++i) {
    tokens.push_back(static_cast<int32_t>(random.bits(static_cast<uint64_t>(i)) % kVocab));
  }
  return tokens;
}

// Released memory is poisoned, so that what a slot still held of an earlier sequence, or what was
// never written, would show.
struct SmallModel {
  explicit SmallModel(const ModelConfig& config, int64_t slots = 1, int64_t capacity = 64,
                      const DecodeOptions& options = {})
      : run(Backend::kCpu, config, packed_batch({3}, kVocab)),
        batch(run.model(), run.params(), run.stream(), slots, capacity, options) {}
  ModelRun run;
  DecodeBatch batch;
};

}  // namespace sbtrain::test
