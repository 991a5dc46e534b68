#include "attention/context.h"

#include <algorithm>
#include <utility>

#include "ops/memory.h"

namespace sbtrain {

Tensor OwnTokens::rows(const Tensor& x_T) const {
  if (!x_T.defined() || chunks == 1) return x_T;
  const int64_t tokens = x_T.rows() / chunks;
  return x_T.row_range(chunk * tokens, tokens);
}

Tensor OwnTokens::per_head(const Tensor& x_HT) const {
  if (!x_HT.defined() || chunks == 1) return x_HT;
  const int64_t heads = x_HT.shape[0];
  return x_HT.reshaped({chunks * heads, x_HT.shape[1] / chunks}).row_range(chunk * heads, heads);
}

std::vector<OwnTokens> own_tokens(const Sequences& sequences) {
  if (sequences.context == nullptr) return {{.sequences = sequences}};
  const auto& chunks = sequences.context->chunks;
  std::vector<OwnTokens> all;
  for (const ContextChunk& chunk : chunks) {
    all.push_back({.chunk = static_cast<int64_t>(all.size()),
                   .chunks = static_cast<int64_t>(chunks.size()),
                   .sequences = chunk.documents});
  }
  return all;
}

// Keys that move to the right come from the left neighbour first, and so the nearest; those that
// move to the left end with it.
KeyRing::KeyRing(Stream& s, const ContextShare& share, const Tensor& k, const Tensor& v, Pass pass,
                 const Tensor& gate_TH)
    : s_(s),
      share_(share),
      pass_(pass),
      dtype_(k.dtype),
      width_(k.cols()),
      heads_(gate_TH.defined() ? gate_TH.cols() : 0),
      step_(pass == Pass::kForward || keeps() ? 1 : -1),
      keys_(static_cast<size_t>(share.ranks->size())),
      arrive_(static_cast<size_t>(share.ranks->size())) {
  for (size_t chunk = 0; chunk < share.chunks.size(); ++chunk) {
    const auto first = static_cast<int64_t>(visits_.size());
    const int before = share.chunks[chunk].place;
    for (int i = 0; i < before; ++i) visits_.push_back({chunk, before - 1 - i, first + i});
    if (pass == Pass::kBackward) std::reverse(visits_.begin() + first, visits_.end());
  }
  keys_[0] = key_numbers();
  ops::run(s, ops::Copy{.y = part(keys_[0], 0, kKeys, dtype_), .x = k});
  ops::run(s, ops::Copy{.y = part(keys_[0], 0, kValues, dtype_), .x = v});
  if (heads_ > 0) ops::run(s, ops::Copy{.y = part(keys_[0], 0, kGates, dtype_), .x = gate_TH});
  const int first_started = keeps() ? share.ranks->size() - 1 : 1;
  for (int hop = 1; hop <= first_started; ++hop) start(hop);
}

// Gates are f32, whatever the keys are.
Buffer KeyRing::key_numbers() const {
  const auto of_gate = static_cast<int64_t>(sizeof(float) / dtype_size(dtype_));
  return s_.scratch("keys and values", dtype_, {share_.tokens * (2 * width_ + of_gate * heads_)});
}
Buffer KeyRing::gradient_sums(int64_t ranks) const {
  return s_.scratch("gradients of keys and values", DType::kF32, {ranks * gradients_of_rank()});
}

Tensor KeyRing::part(const Tensor& numbers, int64_t begin, Part which, DType dtype) const {
  const int64_t tokens = share_.tokens;
  if (which != kGates) {
    const int64_t count = tokens * width_;
    const int64_t first = begin + (which == kValues ? count : 0);
    return numbers.row_range(first, count).reshaped({tokens, width_});
  }
  if (heads_ == 0) return {};
  const auto of_gate = static_cast<int64_t>(sizeof(float) / dtype_size(dtype));
  const Tensor all = numbers.row_range(begin + 2 * tokens * width_, tokens * heads_ * of_gate);
  return {all.data, DType::kF32, {tokens, heads_}};
}

int64_t KeyRing::visits(const ContextShare& share) {
  return chunks_of_rank(share.layout) * share.ranks->size() - 1;
}

std::optional<int64_t> KeyRing::last_visit(const ContextShare& share, int64_t chunk) {
  const ContextChunk& queries = share.chunks[static_cast<size_t>(chunk)];
  if (queries.continued == 0) return {};
  int place = queries.place;
  while (place > 0 && share.keys_of(queries, place - 1) > 0) --place;
  if (place == queries.place) return {};
  int64_t first = 0;
  for (int64_t before = 0; before < chunk; ++before) {
    first += share.chunks[static_cast<size_t>(before)].place;
  }
  return first + queries.place - 1 - place;
}

// The transfer with which the keys of a rank come.
int KeyRing::hop_of(int rank) const {
  const int size = share_.ranks->size();
  return ((share_.ranks->place() - rank) * step_ + size) % size;
}

void KeyRing::start(int hop) {
  if (hop == share_.ranks->size()) return;
  keys_[hop] = key_numbers();
  arrive_[hop] = share_.ranks->start_shift(s_, keys_[hop], keys_[hop - 1], step_);
}

void KeyRing::advance() {
  ++hop_;
  share_.ranks->await(s_, arrive_[hop_]);
  if (keeps()) return;
  keys_[hop_ - 1].release();
  start(hop_ + 1);
  if (pass_ == Pass::kBackward && hop_ > 1) pass_on_gradients();
}

bool KeyRing::next() {
  if (std::exchange(begun_, true)) {
    ++visit_;
  } else if (pass_ == Pass::kBackward) {
    gradients_ = gradient_sums(keeps() ? share_.ranks->size() : 1);
    ops::run(s_, ops::Fill{.x = gradients_, .value = 0.0f});
  }
  if (visit_ < visits_.size()) {
    while (hop_ < hop_of(share_.rank_of(place()))) advance();
    return true;
  }
  while (hop_ + 1 < share_.ranks->size()) advance();
  keys_.clear();
  if (pass_ == Pass::kBackward) send_home();
  return false;
}

// What the ranks have given so far follows the keys to the next rank.
void KeyRing::pass_on_gradients() {
  Buffer coming = gradient_sums(1);
  share_.ranks->await(s_, share_.ranks->start_shift(s_, coming, gradients_, step_));
  gradients_ = std::move(coming);
}

void KeyRing::send_home() {
  at_home_ = gradient_sums(1);
  comes_home_ = keeps() ? share_.ranks->start_sum(s_, at_home_, gradients_)
                        : share_.ranks->start_shift(s_, at_home_, gradients_, step_);
}

KeyRing::Home KeyRing::home() {
  share_.ranks->await(s_, comes_home_);
  gradients_.release();
  const auto mine = [&](Part which) { return part(at_home_, 0, which, DType::kF32); };
  return {.dk = mine(kKeys), .dv = mine(kValues), .dgate = mine(kGates)};
}

OwnTokens KeyRing::own() const {
  return {.chunk = static_cast<int64_t>(visits_[visit_].chunk),
          .chunks = static_cast<int64_t>(share_.chunks.size()),
          .sequences = queries().documents};
}

// Those of the present chunk of keys, of what a rank has.
Tensor KeyRing::chunk_rows(const Tensor& x_T) const {
  if (!x_T.defined()) return x_T;
  const int64_t tokens = share_.chunk_tokens();
  return x_T.row_range(share_.chunk_of(place()) * tokens, tokens);
}

Tensor KeyRing::key(Part which) const {
  return chunk_rows(part(keys_[hop_of(share_.rank_of(place()))], 0, which, dtype_));
}

Tensor KeyRing::gradient(Part which) const {
  const int64_t begin = keeps() ? share_.rank_of(place()) * gradients_of_rank() : 0;
  return chunk_rows(part(gradients_, begin, which, DType::kF32));
}

std::unique_ptr<KeyRing> key_ring(Stream& s, const Sequences& sequences, const Tensor& k,
                                  const Tensor& v, KeyRing::Pass pass, const Tensor& gate_TH) {
  if (sequences.context == nullptr) return nullptr;
  return std::make_unique<KeyRing>(s, *sequences.context, k, v, pass, gate_TH);
}

}  // namespace sbtrain
