// The part of sbtrain eval that looks at attention: dumps of maps, and their overlap with the
// positions that a task says are the true ones.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/config.h"
#include "serve/inference.h"

namespace CLI {
class App;
}

namespace sbtrain {

struct AttentionEvalOptions {
  std::string maps;                // folder to write maps to
  std::string text;                // what to look at: text,
  std::vector<int32_t> token_ids;  // or tokens
  std::string true_positions;      // JSON file with examples
  double threshold = 0.5;

  void add(CLI::App& command);
  bool asked() const { return !maps.empty() || !true_positions.empty(); }
};

inline constexpr int64_t kMaxMapTokens = 4096;

// Writes `maps.json` and a file for each head:  f32 [T, T], row j what token j attends to; with a
// remainder f32 [T] behind it. Returns what maps.json holds. `tokenizer` may be empty for token
// ids. Throws ExitCode::kUsage for no token, more than kMaxMapTokens, or a token outside the
// vocabulary.
nlohmann::ordered_json dump_attention_maps(InferenceModel& model,
                                           const AttentionEvalOptions& options,
                                           const std::string& tokenizer);

// {"examples": [{"tokens": [ids], "positions": [[query, key], ...]}, ...]} against every head.
nlohmann::ordered_json measure_overlap(InferenceModel& model, const AttentionEvalOptions& options);

}  // namespace sbtrain
