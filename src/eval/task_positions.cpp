#include "eval/task_positions.h"

#include <unordered_map>

#include "core/error.h"

namespace sbtrain {

std::vector<TruePosition> answer_positions(const PackedBatch& example) {
  std::vector<TruePosition> positions;
  std::unordered_map<int32_t, size_t> last;  // the last position of each token so far
  for (size_t at = 0; at < example.tokens.size(); ++at) {
    const int32_t token = example.tokens[at];
    if (example.targets[at] >= 0) {
      const auto key = last.find(token);
      if (key == last.end() || example.tokens[key->second + 1] != example.targets[at]) {
        fail(ExitCode::kData, "position {}: its answer does not follow token {} before it", at,
             token);
      }
      positions.push_back(
          {.query = static_cast<int64_t>(at), .key = static_cast<int64_t>(key->second + 1)});
    }
    last[token] = at;
  }
  return positions;
}

}  // namespace sbtrain
