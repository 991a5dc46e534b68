#include "eval/rank_sums.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>

#include "core/error.h"

namespace sbtrain {
namespace {

// What one batch may take, beyond the deadline for progress: the first may wait for kernels to be
// built, and a long context on the CPU takes minutes.
constexpr std::chrono::minutes kLongBatch{30};

// Of one text, which has to be below Control::kLargestText, and those of all ranks together below
// what a message holds.
constexpr size_t kPiece = size_t{256} << 10;

// The texts of all ranks, which may be of any size. A whole piece means that another one follows.
std::vector<std::string> exchange_pieces(Control& ranks, const std::string& mine) {
  std::vector<std::string> all(static_cast<size_t>(ranks.world()));
  bool more = true;
  for (size_t begin = 0; more; begin += kPiece) {
    const std::string piece = begin < mine.size() ? mine.substr(begin, kPiece) : "";
    const std::vector<std::string> pieces = ranks.exchange("sums", all_ranks(ranks.world()), piece);
    more = false;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      all[rank] += pieces[rank];
      more |= pieces[rank].size() == kPiece;
    }
  }
  return all;
}

std::string to_text(const std::vector<double>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(double)};
}

std::vector<double> to_numbers(const std::string& text) {
  std::vector<double> numbers(text.size() / sizeof(double));
  std::memcpy(numbers.data(), text.data(), numbers.size() * sizeof(double));
  return numbers;
}

void add(std::vector<double>& sums, const std::vector<double>& numbers) {
  if (sums.empty()) sums.resize(numbers.size());
  require(sums.size() == numbers.size(), "a batch gives {} numbers, others {}", numbers.size(),
          sums.size());
  std::ranges::transform(sums, numbers, sums.begin(), std::plus<>());
}

}  // namespace

std::vector<double> sum_over_ranks(Control& ranks, int64_t batches,
                                   const std::function<std::vector<double>(int64_t)>& of_batch) {
  std::vector<double> sums;
  const int64_t world = ranks.world();
  for (int64_t first = 0; first < batches; first += world) {
    const int64_t mine = first + ranks.rank();
    ranks.progress(fmt::format("batches from {} of {}", first, batches), kLongBatch);
    const std::vector<double> numbers = mine < batches ? of_batch(mine) : std::vector<double>();
    const std::vector<std::string> all = exchange_pieces(ranks, to_text(numbers));
    const int64_t present = std::min(world, batches - first);
    for (int64_t rank = 0; rank < present; ++rank) {
      add(sums, to_numbers(all[static_cast<size_t>(rank)]));
    }
  }
  return sums;
}

}  // namespace sbtrain
