#include "serve/decode_batch.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "ops/memory.h"

namespace sbtrain {
namespace {

// Prompt tokens whose logits exist at once. Like the rows of a step, few enough that a row's logits
// do not depend on the others (ops/cpu/few_rows.h).
constexpr int64_t kPromptRows = 64;

Buffer integers(Stream& s, int64_t n) {
  return s.memory().allocate(MemoryClass::kInputs, "tokens", DType::kI32, {n});
}

}  // namespace

DecodeBatch::DecodeBatch(const Transformer& model, ParamAccess& params, Stream& s, int64_t slots,
                         int64_t capacity)
    : model_(model),
      params_(params),
      s_(s),
      capacity_(capacity),
      vocab_(model.config().vocab),
      lengths_(static_cast<size_t>(slots)),
      cache_(model.allocate_cache(s.memory(), slots, capacity)),
      tokens_T_(integers(s, capacity)),
      positions_T_(integers(s, capacity)),
      boundaries_(integers(s, 2)),
      tokens_B_(integers(s, slots)),
      positions_B_(integers(s, slots)),
      lengths_B_(integers(s, slots)),
      logits_CV_(s.memory().allocate(MemoryClass::kLogits, "logits", DType::kF32,
                                     {std::max(slots, std::min(capacity, kPromptRows)), vocab_})),
      logits_(static_cast<size_t>(slots * vocab_)) {}

int64_t DecodeBatch::free_slots() const {
  return std::count(lengths_.begin(), lengths_.end(), 0);
}

Tensor DecodeBatch::upload(const Buffer& buffer, const std::vector<int32_t>& values) const {
  const Tensor y = buffer.tensor().row_range(0, static_cast<int64_t>(values.size()));
  ops::run(s_, ops::CopyFromHost{.y = y, .host = values.data()});
  return y;
}

int64_t DecodeBatch::start(std::span<const int32_t> prompt, const PromptLogits& visit) {
  const auto length = static_cast<int64_t>(prompt.size());
  require(length > 0 && length <= capacity_, "a prompt of {} tokens for a capacity of {}", length,
          capacity_);
  const int64_t slot = std::find(lengths_.begin(), lengths_.end(), 0) - lengths_.begin();
  require(slot < slots(), "all {} slots are in use", slots());
  std::vector<int32_t> positions(prompt.size());
  std::iota(positions.begin(), positions.end(), 0);
  const BatchTensors batch = {
      .tokens_T = upload(tokens_T_, {prompt.begin(), prompt.end()}),
      .targets_T = {},
      .sequences = {.cu_seqlens = upload(boundaries_, {0, static_cast<int32_t>(length)}),
                    .positions_T = upload(positions_T_, positions),
                    .count = 1,
                    .max_seqlen = capacity_}};
  const Tensor& all = logits_CV_;
  if (visit) {
    const Tensor logits_CV = all.row_range(0, std::min(all.rows(), kPromptRows));
    prompt_logits_.resize(static_cast<size_t>(logits_CV.numel()));
    model_.prefill(s_, params_, batch, cache_, slot, logits_CV,
                   [&](int64_t first, const Tensor& logits_NV) {
                     ops::run(s_, ops::CopyToHost{.host = prompt_logits_.data(), .x = logits_NV});
                     visit(first, logits_NV.rows(),
                           std::span(prompt_logits_).first(static_cast<size_t>(logits_NV.numel())));
                   });
  } else {
    model_.prefill(s_, params_, batch, cache_, slot, all.row_range(0, 1));
  }
  ops::run(s_, ops::CopyToHost{.host = logits_.data() + slot * vocab_, .x = all.row_range(0, 1)});
  lengths_[static_cast<size_t>(slot)] = length;
  return slot;
}

void DecodeBatch::stop(int64_t slot) {
  require(used(slot), "slot {} has no sequence", slot);
  lengths_[static_cast<size_t>(slot)] = 0;
}

void DecodeBatch::step(std::span<const int32_t> tokens) {
  require(static_cast<int64_t>(tokens.size()) == slots(), "{} tokens for {} slots", tokens.size(),
          slots());
  // Slots after the last used one take no part. A free one before it runs as the first token of a
  // sequence: that only touches its own part of the cache, which the next prompt fills anew.
  int64_t rows = slots();
  while (rows > 0 && !used(rows - 1)) --rows;
  if (rows == 0) return;
  const auto n = static_cast<size_t>(rows);
  std::vector<int32_t> new_tokens(n);
  std::vector<int32_t> positions(n);
  std::vector<int32_t> new_lengths(n, 1);
  for (size_t b = 0; b < n; ++b) {
    if (lengths_[b] == 0) continue;
    require(lengths_[b] < capacity_, "the sequence in slot {} has {} tokens already", b, capacity_);
    new_tokens[b] = tokens[b];
    positions[b] = static_cast<int32_t>(lengths_[b]);
    new_lengths[b] = static_cast<int32_t>(++lengths_[b]);
  }
  const Tensor logits_BV = logits_CV_.tensor().row_range(0, rows);
  model_.decode(s_, params_, upload(tokens_B_, new_tokens), cache_,
                {.positions_B = upload(positions_B_, positions),
                 .lengths_B = upload(lengths_B_, new_lengths)},
                logits_BV);
  ops::run(s_, ops::CopyToHost{.host = logits_.data(), .x = logits_BV});
}

std::span<const float> DecodeBatch::logits(int64_t slot) const {
  require(used(slot), "slot {} has no sequence", slot);
  return std::span(logits_).subspan(static_cast<size_t>(slot * vocab_),
                                    static_cast<size_t>(vocab_));
}

}  // namespace sbtrain
