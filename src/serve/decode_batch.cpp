#include "serve/decode_batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

#include "core/error.h"
#include "model/inference/decode.h"
#include "ops/memory.h"
#include "ops/sampling.h"
#include "ops/stream_control.h"

namespace sbtrain {
namespace {

// Prompt tokens whose logits exist at once. Like the rows of a step, few enough that a row's logits
// do not depend on the others (ops/cpu/blas.h).
constexpr int64_t kPromptRows = 64;

Buffer integers(Stream& s, int64_t n) {
  return s.memory().allocate(MemoryClass::kInputs, "tokens", DType::kI32, {n});
}

Buffer logits_of(Stream& s, int64_t rows, int64_t vocab) {
  return s.memory().allocate(MemoryClass::kLogits, "logits", DType::kF32, {rows, vocab});
}

Tensor upload(Stream& s, const Buffer& buffer, const std::vector<int32_t>& values) {
  const Tensor y = buffer.tensor().row_range(0, static_cast<int64_t>(values.size()));
  ops::run(s, ops::CopyFromHost{.y = y, .host = values.data()});
  return y;
}

std::string program_name(int64_t rows) {
  return fmt::format("decode {}", rows);
}

}  // namespace

DecodeBatch::DecodeBatch(const Transformer& model, ParamAccess& params, Stream& s, int64_t slots,
                         int64_t capacity, const DecodeOptions& options)
    : model_(model),
      params_(params),
      s_(s),
      options_(options),
      capacity_(capacity),
      vocab_(model.config().vocab),
      lengths_(static_cast<size_t>(slots)),
      reaches_(static_cast<size_t>(slots), capacity),
      cache_(s.memory(), model, slots, capacity, options.dropping),
      tokens_T_(integers(s, capacity)),
      positions_T_(integers(s, capacity)),
      boundaries_(integers(s, 2)),
      prompt_logits_CV_(logits_of(s, std::min(capacity, kPromptRows), vocab_)),
      inputs_4B_(integers(s, 4 * slots)),
      logits_BV_(logits_of(s, slots, vocab_)),
      likeliest_B_(integers(s, slots)),
      tops_(static_cast<size_t>(slots)),
      logits_(static_cast<size_t>(slots * vocab_)),
      fetched_(static_cast<size_t>(slots)) {
  if (records_steps()) plan_steps();
}

// The rows of a step, and some that are idle, so that few numbers of rows are planned and recorded:
// a power of two, or all.
int64_t DecodeBatch::with_idle_rows(int64_t rows) const {
  if (!records_steps()) return rows;
  return std::min(slots(), static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows))));
}

void DecodeBatch::plan_steps() {
  Memory memory = Memory::planning(s_.memory().target());
  Stream stream(memory);
  for (int64_t rows = 1;; rows = with_idle_rows(rows + 1)) {
    const ProgramScope scope(memory, program_name(rows));
    decode(stream, rows);
    if (rows == slots()) break;
  }
  if (s_.backend() == Backend::kPlan) {
    planned_steps_ = s_.memory().allocate(MemoryClass::kActivations, "steps", DType::kU8,
                                          {static_cast<int64_t>(memory.report().pool_bytes)});
    return;
  }
  recorded_ = std::make_unique<Recorded>(s_.backend());
  ops::control(recorded_->stream).set_overlap(options_.overlap);
  recorded_->memory.adopt_plan(memory);
}

int64_t DecodeBatch::free_slots() const {
  return std::count(lengths_.begin(), lengths_.end(), 0) - (prompt_.slot >= 0 ? 1 : 0);
}

int64_t DecodeBatch::free_slot() const {
  int64_t slot = 0;
  while (slot < slots() && (used(slot) || slot == prompt_.slot)) ++slot;
  require(slot < slots(), "all {} slots are in use", slots());
  return slot;
}

std::vector<int64_t> DecodeBatch::used_slots() const {
  std::vector<int64_t> used;
  for (int64_t slot = 0; slot < slots(); ++slot) {
    if (length(slot) > 0) used.push_back(slot);
  }
  return used;
}

template <typename Work>
void DecodeBatch::with_slot(int64_t slot, const Work& work) {
  try {
    work();
  } catch (const CacheFull&) {
    cache_.kept()->release(slot);
    prompt_ = {};
    throw;
  }
}

std::vector<int64_t> DecodeBatch::make_room() {
  return cache_.kept() != nullptr ? cache_.kept()->make_room(s_, used_slots())
                                  : std::vector<int64_t>();
}

CacheUse DecodeBatch::cache_use(bool now) {
  if (cache_.kept() == nullptr) return {};
  if (now) cache_.kept()->read_counts(s_, used_slots());
  return cache_.kept()->use();
}

BatchTensors DecodeBatch::upload_prompt(std::span<const int32_t> prompt, int64_t slot,
                                        int64_t reach) {
  const auto length = static_cast<int64_t>(prompt.size());
  if (reach == 0) reach = capacity_;
  require(length > 0 && length <= reach && reach <= capacity_,
          "a prompt of {} tokens, and {} in the end, for a capacity of {}", length, reach,
          capacity_);
  require(prompt_.slot < 0, "another prompt has begun in slot {}", prompt_.slot);
  reaches_[static_cast<size_t>(slot)] = reach;
  std::vector<int32_t> positions(prompt.size());
  std::iota(positions.begin(), positions.end(), 0);
  return {.tokens_T = upload(s_, tokens_T_, {prompt.begin(), prompt.end()}),
          .targets_T = {},
          .sequences = {.cu_seqlens = upload(s_, boundaries_, {0, static_cast<int32_t>(length)}),
                        .positions_T = upload(s_, positions_T_, positions),
                        .count = 1,
                        .max_seqlen = capacity_,
                        .reach = reach}};
}

void DecodeBatch::see_logits(const PromptLogits& visit, int64_t first, const Tensor& logits_NV) {
  prompt_logits_.resize(static_cast<size_t>(prompt_logits_CV_.tensor().numel()));
  ops::run(s_, ops::CopyToHost{.host = prompt_logits_.data(), .x = logits_NV});
  visit(first, logits_NV.rows(),
        std::span(prompt_logits_).first(static_cast<size_t>(logits_NV.numel())));
}

// The prompt has run: the slot's logits are there.
void DecodeBatch::begin_sequence(int64_t slot, int64_t length) {
  find_likeliest(s_, slot, 1);
  read_likeliest(s_, slot, 1);
  lengths_[static_cast<size_t>(slot)] = length;
}

int64_t DecodeBatch::start(std::span<const int32_t> prompt, const PromptLogits& visit,
                           int64_t reach) {
  const int64_t slot = free_slot();
  const BatchTensors batch = upload_prompt(prompt, slot, reach);
  const Tensor logits_1V = logits_BV_.tensor().row_range(slot, 1);
  with_slot(slot, [&] {
    if (!visit) return prefill(s_, model_, params_, batch, cache_, slot, logits_1V);
    const Tensor& logits_CV = prompt_logits_CV_;
    prefill(s_, model_, params_, batch, cache_, slot, logits_CV,
            [&](int64_t first, const Tensor& logits_NV) { see_logits(visit, first, logits_NV); });
    ops::run(s_, ops::Copy{.y = logits_1V, .x = logits_CV.row_range(0, 1)});
  });
  begin_sequence(slot, batch.tokens());
  return slot;
}

int64_t DecodeBatch::begin(std::span<const int32_t> prompt, const PromptLogits& visit,
                           int64_t reach) {
  const int64_t slot = free_slot();
  const BatchTensors batch = upload_prompt(prompt, slot, reach);
  prompt_ = {.slot = slot, .visit = visit, .run = PartialPrefill(batch)};
  return slot;
}

bool DecodeBatch::advance(int64_t& tokens) {
  require(prompt_.slot >= 0, "no prompt has begun");
  PartialPrefill& run = prompt_.run;
  const int64_t length = run.tokens();
  const int64_t layers = model_.config().layers;
  if (const int64_t done = run.layers_run(); done < layers) {
    const int64_t more = std::clamp<int64_t>(tokens * layers / length, 1, layers - done);
    tokens -= (more * length + layers - 1) / layers;
    run.run_layers(s_, model_, params_, more);
  } else {
    const int64_t rows = std::clamp<int64_t>(tokens, 1, length - run.rows_seen());
    tokens -= rows;
    run.see_rows(s_, model_, params_, rows, prompt_logits_CV_,
                 [&](int64_t first, const Tensor& logits_NV) {
                   see_logits(prompt_.visit, first, logits_NV);
                 });
  }
  if (run.layers_run() < layers || (prompt_.visit && run.rows_seen() < length)) {
    // Otherwise the next step would wait for the GPU behind several parts.
    ops::run(s_, ops::Synchronize{});
    return false;
  }
  const int64_t slot = prompt_.slot;
  with_slot(slot, [&] {
    run.finish(s_, model_, params_, cache_, slot, logits_BV_.tensor().row_range(slot, 1));
  });
  begin_sequence(slot, length);
  prompt_ = {};
  return true;
}

void DecodeBatch::stop(int64_t slot) {
  if (slot >= 0 && slot == prompt_.slot) {
    prompt_ = {};
    return;
  }
  require(used(slot), "slot {} has no sequence", slot);
  lengths_[static_cast<size_t>(slot)] = 0;
  if (cache_.kept() != nullptr) cache_.kept()->release(slot);
}

// Slots after the last used one take no part, except for idle rows.
int64_t DecodeBatch::rows_of_step() const {
  int64_t rows = slots();
  while (rows > 0 && !used(rows - 1)) --rows;
  return rows;
}

Tensor DecodeBatch::input(int64_t part, int64_t rows) const {
  return inputs_4B_.tensor().row_range(part * slots(), rows);
}

void DecodeBatch::decode(Stream& s, int64_t rows) {
  sbtrain::decode(s, model_, params_, input(0, rows), cache_,
                  {.positions_B = input(1, rows),
                   .lengths_B = input(2, rows),
                   .reach_B = input(3, rows),
                   .norm = {}},
                  logits_BV_.tensor().row_range(0, rows));
  find_likeliest(s, 0, rows);
}

void DecodeBatch::step(std::span<const int32_t> tokens) {
  require(static_cast<int64_t>(tokens.size()) == slots(), "{} tokens for {} slots", tokens.size(),
          slots());
  if (rows_of_step() == 0) return;
  if (cache_.kept() != nullptr) {
    if (!make_room().empty()) throw cache_.kept()->full();
    cache_.kept()->stepped(used_slots());
  }
  const int64_t rows = with_idle_rows(rows_of_step());
  // A free slot among them runs as the first token of a sequence: that only touches its own part
  // of the cache, which the next prompt fills anew.
  const auto B = static_cast<size_t>(slots());
  std::vector<int32_t> inputs(4 * B);
  std::fill(inputs.begin() + static_cast<ptrdiff_t>(2 * B), inputs.end(), 1);
  for (size_t b = 0; b < static_cast<size_t>(rows); ++b) {
    if (lengths_[b] == 0) continue;
    require(lengths_[b] < reaches_[b], "the sequence in slot {} has {} tokens already", b,
            reaches_[b]);
    inputs[b] = tokens[b];
    inputs[B + b] = static_cast<int32_t>(lengths_[b]);
    inputs[2 * B + b] = static_cast<int32_t>(++lengths_[b]);
    inputs[3 * B + b] = static_cast<int32_t>(reaches_[b]);
  }
  upload(step_stream(), inputs_4B_, inputs);
  if (!records_steps()) {
    decode(s_, rows);
  } else if (recorded_) {
    const auto work = [&] {
      const ProgramScope scope(recorded_->memory, program_name(rows));
      decode(recorded_->stream, rows);
    };
    options_.recorded ? recorded_->graph.run("decode", rows, work) : work();
  }
  read_likeliest(step_stream(), 0, rows);
}

void DecodeBatch::find_likeliest(Stream& s, int64_t first, int64_t rows) const {
  ops::run(s, ops::Argmax{.y_B = likeliest_B_.tensor().row_range(first, rows),
                          .x_BV = logits_BV_.tensor().row_range(first, rows),
                          .vocab = options_.vocab > 0 ? std::min(options_.vocab, vocab_) : vocab_});
}

// The host waits here.
void DecodeBatch::read_likeliest(Stream& s, int64_t first, int64_t rows) {
  ops::run(s, ops::CopyToHost{.host = tops_.data() + first,
                              .x = likeliest_B_.tensor().row_range(first, rows)});
  std::fill_n(fetched_.begin() + first, rows, uint8_t{0});
}

int32_t DecodeBatch::likeliest(int64_t slot) const {
  require(used(slot), "slot {} has no sequence", slot);
  const int32_t token = tops_[static_cast<size_t>(slot)];
  if (token < 0) {
    fail(ExitCode::kDiverged, "the model's logits are not finite; its weights are damaged");
  }
  return token;
}

bool DecodeBatch::draws_from_logits(const SamplingOptions& sampling) const {
  const auto limit = [&](int64_t tokens) { return tokens > 0 ? std::min(tokens, vocab_) : vocab_; };
  return sampling.temperature > 0 || limit(sampling.vocab) != limit(options_.vocab);
}

int32_t DecodeBatch::draw(int64_t slot, const SamplingOptions& sampling, uint64_t position,
                          const LogitChanges& changes) {
  if (!changes.any() && !draws_from_logits(sampling)) return likeliest(slot);
  const auto vocab =
      static_cast<size_t>(sampling.vocab > 0 ? std::min(sampling.vocab, vocab_) : vocab_);
  const std::span<const float> given = logits(slot).first(vocab);
  if (!changes.any()) return sample_token(given, sampling, position);
  std::vector<float> changed(given.begin(), given.end());
  change_logits(changes, changed);
  return sample_token(changed, sampling, position);
}

std::span<const float> DecodeBatch::logits(int64_t slot) {
  require(used(slot), "slot {} has no sequence", slot);
  float* row = logits_.data() + slot * vocab_;
  uint8_t& fetched = fetched_[static_cast<size_t>(slot)];
  if (!fetched) {
    ops::run(s_, ops::CopyToHost{.host = row, .x = logits_BV_.tensor().row_range(slot, 1)});
    fetched = 1;
  }
  return {row, static_cast<size_t>(vocab_)};
}

void DecodeBatch::fetch_logits() {
  const int64_t rows = rows_of_step();
  if (std::all_of(fetched_.begin(), fetched_.begin() + rows, [](uint8_t f) { return f != 0; })) {
    return;
  }
  ops::run(s_,
           ops::CopyToHost{.host = logits_.data(), .x = logits_BV_.tensor().row_range(0, rows)});
  std::fill_n(fetched_.begin(), rows, uint8_t{1});
}

void DecodeBatch::set_profile(OpProfile* profile) {
  Stream& s = step_stream();
  if (profile == nullptr && s.profile()) ops::run(s, ops::Synchronize{});  // collects the times
  s.set_profile(profile);
}

}  // namespace sbtrain
