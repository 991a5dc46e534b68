// The stick-breaking backward pass for sm_90a where the states of a head do not fit.
#include "kernels/attention/launch_stickbreaking_hopper.cuh"

namespace sbtrain::kernels {
namespace {

constexpr const char* kName = "stickbreaking_backward";

void set_to_zero(cudaStream_t stream, void* data, int64_t count) {
  check_cuda(kName, cudaMemsetAsync(data, 0, static_cast<size_t>(count) * 4, stream));
}

// There are many launches, of which most have nothing to do where sticks are used up: nothing is
// sorted for them. Long tiles come first nevertheless, those of late queries and early keys.
template <typename Mainloop>
void launch_part(cudaStream_t stream, HopperBackwardArguments& x, int rows, const int* order,
                 int* taken) {
  x.scheduler = {.taken = taken,
                 .order = const_cast<int*>(order),
                 .tiles = static_cast<int>(ceil_div(rows, Mainloop::kTileRows)),
                 .heads = 1,
                 .heads_at_a_time = 1};
  launch_scheduled<Mainloop>(kName, stream, x);
}

// Of the segment's keys, with gates.
void write_gate_gradients(cudaStream_t stream, const HopperBackwardArguments& x, int keys) {
  if (x.p.gate == nullptr) return;
  const auto blocks = static_cast<unsigned>(ceil_div(keys, kStickKeys));
  write_gate_gradients_kernel<<<blocks, kStickKeys, 0, stream>>>(x);
  check_launch(kName);
}

template <typename Query, typename Key>
void backward_head(cudaStream_t stream, HopperBackwardArguments& x,
                   const SegmentLaunches& launches) {
  set_to_zero(stream, launches.counters, int64_t{2} * launches.segments * launches.segments);
  prepare_segments_kernel<<<static_cast<unsigned>(launches.segments), kSegmentThreads, 0, stream>>>(
      x.p, x.first_head, launches);
  check_launch(kName);
  prepare_gates(stream, x, 1);
  const StickBreakingProblem& p = x.p;
  const CUtensorMap of_query[] = {token_tiles(p, p.q, Query::kQueries),
                                  token_tiles(p, p.dout, Query::kQueries)};
  const CUtensorMap of_key[] = {token_tiles(p, p.q, Key::kQueries),
                                token_tiles(p, p.dout, Key::kQueries)};
  int* taken = launches.counters;
  for_each_segment(
      x,
      [&](int queries, int keys) {
        x.q = of_query[0], x.dout = of_query[1];
        const auto tiles = static_cast<int>(ceil_div(queries, Query::kQueries));
        launch_part<StickQueryGradientMainloop<Query>>(
            stream, x, queries, launches.orders + 2 * launches.tiles - tiles, taken++);
        x.q = of_key[0], x.dout = of_key[1];
        launch_part<StickKeyGradientMainloop<Key>>(stream, x, keys, launches.orders, taken++);
      },
      [&](float* sums, int64_t count) { set_to_zero(stream, sums, count); },
      [&](int keys) { write_gate_gradients(stream, x, keys); });
}

template <template <typename> class Kind>
void backward_in_segments(cudaStream_t stream, const StickBreakingProblem& p) {
  with_hopper_head_dim(kName, p.head_dim, [&](auto d) {
    HopperBackwardArguments x = backward_arguments(p);
    const SegmentLaunches launches = segment_launches(p);
    place_in_scratch(x);
    for (x.first_head = 0; x.first_head < p.heads; ++x.first_head) {
      backward_head<Kind<QueryGradientShape<d(), false, true>>,
                    Kind<KeyGradientShape<d(), false, true>>>(stream, x, launches);
    }
  });
}

}  // namespace

void stickbreaking_backward_in_segments(cudaStream_t stream, const StickBreakingProblem& p) {
  if (p.gate) return backward_in_segments<Gated>(stream, p);
  backward_in_segments<Unfolded>(stream, p);
}

}  // namespace sbtrain::kernels
