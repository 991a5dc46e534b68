#include "attention/context.h"

#include <utility>

#include "ops/memory.h"

namespace sbtrain {
namespace {

Buffer keys_and_values(const Stream& s, const char* name, DType dtype, const Tensor& k) {
  return s.scratch(name, dtype, {2, k.rows(), k.cols()});
}

}  // namespace

Tensor KeyRing::part(const Tensor& kv, int64_t index) {
  const int64_t tokens = kv.shape[1];
  return kv.reshaped({2 * tokens, kv.shape[2]}).row_range(index * tokens, tokens);
}

// Keys that move to the right come from the left neighbour first, and so the nearest; those that
// move to the left end with it.
KeyRing::KeyRing(Stream& s, const ContextShare& share, const Tensor& k, const Tensor& v,
                 Order order)
    : s_(s),
      share_(share),
      step_(order == Order::kNearestFirst ? 1 : -1),
      rank_(share.ranks->place()),
      held_(keys_and_values(s, "keys and values", k.dtype, k)) {
  ops::run(s, ops::Copy{.y = this->k(), .x = k});
  ops::run(s, ops::Copy{.y = this->v(), .x = v});
  start();
}

void KeyRing::start() {
  if (hop_ + 1 == share_.ranks->size()) return;
  coming_ = keys_and_values(s_, "keys and values", k().dtype, k());
  arrives_ = share_.ranks->start_shift(s_, coming_, held_, step_);
}

bool KeyRing::next() {
  const int size = share_.ranks->size();
  if (++hop_ == size) {
    held_.release();
    return false;
  }
  share_.ranks->await(s_, arrives_);
  held_ = std::move(coming_);
  rank_ = (rank_ - step_ + size) % size;
  start();
  return true;
}

KeyGradientRing::KeyGradientRing(Stream& s, const ContextShare& share, const Tensor& k)
    : s_(s),
      share_(share),
      held_(keys_and_values(s, "gradients of keys and values", DType::kF32, k)) {
  ops::run(s, ops::Fill{.x = held_, .value = 0.0f});
}

void KeyGradientRing::pass_on() {
  Buffer coming = keys_and_values(s_, "gradients of keys and values", DType::kF32, dk());
  share_.ranks->await(s_, share_.ranks->start_shift(s_, coming, held_, -1));
  held_ = std::move(coming);
}

void KeyGradientRing::next() {
  if (!std::exchange(first_, false)) pass_on();
}

void KeyGradientRing::home() {
  pass_on();
}

}  // namespace sbtrain
