// Sums over batches that are dealt to the ranks of a job: rank r of W evaluates the batches r,
// r + W, r + 2 W, ... Every batch gives numbers of its own, which are added in the order of the
// batches, so that the sums have the same bits however many ranks there are.
#pragma once

#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

#include "job/control.h"

namespace sbtrain {

// The sums of what of_batch(0), of_batch(1), ... of_batch(batches - 1) give, each of them called on
// one rank only: the same on all ranks, and empty without batches. All batches give equally many
// numbers. Every rank calls it; throws the job's failure.
std::vector<double> sum_over_ranks(Control& ranks, int64_t batches,
                                   const std::function<std::vector<double>(int64_t)>& of_batch);

// The same for scores whose member visit(f) calls f with each of their numbers, in the same order
// always: doubles, or counts below 2^53, which a double holds exactly. `sum` is zero at first.
template <typename Scores>
Scores sum_over_ranks(Control& ranks, int64_t batches, Scores sum,
                      const std::function<Scores(int64_t)>& of_batch) {
  const auto numbers_of = [&](int64_t i) {
    std::vector<double> numbers;
    of_batch(i).visit([&](const auto& number) { numbers.push_back(static_cast<double>(number)); });
    return numbers;
  };
  const std::vector<double> numbers = sum_over_ranks(ranks, batches, numbers_of);
  auto next = numbers.begin();
  sum.visit([&](auto& number) {
    if (next != numbers.end()) number = static_cast<std::decay_t<decltype(number)>>(*next++);
  });
  return sum;
}

}  // namespace sbtrain
