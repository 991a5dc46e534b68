// Weights by name, wherever they are stored: a checkpoint, or a folder of Hugging Face files.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"

namespace sbtrain {

class WeightSource {
 public:
  virtual ~WeightSource() = default;

  virtual std::string name() const = 0;                // for messages: the folder
  virtual std::vector<std::string> names() const = 0;  // the model's own, in any order
  virtual bool has(std::string_view name) const = 0;
  // Global shape. Throws ExitCode::kNoCheckpoint when there is no such tensor.
  virtual const std::vector<int64_t>& shape(std::string_view name) const = 0;
  // Reads flat elements [begin, end) as f32. May be called by several threads at once. Throws
  // ExitCode::kNoCheckpoint for data that cannot be read or is damaged.
  virtual void read(std::string_view name, int64_t begin, int64_t end, float* out) const = 0;
};

// Reads as source.read() does, and throws ExitCode::kNoCheckpoint for weights that are NaN or
// infinite: no model can begin with them.
inline void read_finite(const WeightSource& source, std::string_view name, int64_t begin,
                        int64_t end, float* out) {
  source.read(name, begin, end, out);
  const std::span<const float> values(out, static_cast<size_t>(end - begin));
  if (std::ranges::all_of(values, [](float value) { return std::isfinite(value); })) return;
  fail(ExitCode::kNoCheckpoint,
       "{}: {} has values that are NaN or infinite, with which no model can compute; take the "
       "weights from their origin again, or earlier ones",
       source.name(), name);
}

}  // namespace sbtrain
