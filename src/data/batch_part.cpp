#include "data/batch_part.h"

#include <algorithm>

#include "core/error.h"

namespace sbtrain {

BatchPart part_of(const PackedBatch& whole, int place, int parts) {
  const auto tokens = static_cast<int64_t>(whole.tokens.size());
  require(parts > 0 && place >= 0 && place < parts && tokens % parts == 0,
          "{} tokens have no part {} of {}", tokens, place, parts);
  const int64_t n = tokens / parts;
  const int64_t begin = n * place;
  const auto cut = [&](const std::vector<int32_t>& values) {
    return std::vector<int32_t>(values.begin() + begin, values.begin() + begin + n);
  };
  BatchPart part{.batch = {.tokens = cut(whole.tokens),
                           .targets = cut(whole.targets),
                           .positions = cut(whole.positions),
                           .cu_seqlens = {0},
                           .valid_targets = 0},
                 .cut_positions = {}};
  PackedBatch& mine = part.batch;
  mine.valid_targets = std::ranges::count_if(mine.targets, [](int32_t t) { return t >= 0; });
  for (size_t i = 1; i < whole.cu_seqlens.size(); ++i) {
    const int64_t first = whole.cu_seqlens[i - 1];
    const int64_t end = std::min<int64_t>(whole.cu_seqlens[i], begin + n);
    if (end <= begin || first >= begin + n) continue;
    const int64_t length = end - begin - mine.cu_seqlens.back();
    for (int32_t t = 0; t < length; ++t) part.cut_positions.push_back(t);
    mine.cu_seqlens.push_back(static_cast<int32_t>(end - begin));
    if (first >= begin) continue;
    part.continued = end - begin;
    part.earlier = begin - first;
  }
  return part;
}

}  // namespace sbtrain
