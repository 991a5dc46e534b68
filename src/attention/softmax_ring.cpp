#include "attention/softmax_ring.h"

#include "ops/memory.h"

namespace sbtrain {

void add_far_softmax(Stream& s, const Tensor& o_THd, const Tensor& lse_HT, const FarSoftmax& x,
                     KeyRing& ring) {
  // Sums are f32.
  Buffer sums;
  const bool apart = o_THd.dtype != DType::kF32;
  if (apart) {
    sums = s.scratch("o of other chunks", DType::kF32, {o_THd.rows(), o_THd.cols()});
    ops::run(s, ops::Copy{.y = sums, .x = o_THd});
  }
  while (ring.next()) {
    const OwnTokens own = ring.own();
    ops::run(s, ops::SoftmaxFarForward{.o_THd = own.rows(apart ? sums.tensor() : o_THd),
                                       .lse_HT = own.per_head(lse_HT),
                                       .q_THd = own.rows(x.q_THd),
                                       .k_THd = ring.k(),
                                       .v_THd = ring.v(),
                                       .bias = x.bias,
                                       .far = ring.keys(),
                                       .distance = ring.distance(),
                                       .params = x.params});
  }
  if (apart) ops::run(s, ops::Copy{.y = o_THd, .x = sums});
}

FarSoftmaxBackward::FarSoftmaxBackward(Stream& s, const Tensor& do_THd, const Tensor& o_THd,
                                       const Tensor& lse_HT, const FarSoftmax& x,
                                       std::unique_ptr<KeyRing> ring)
    : s_(s),
      ring_(std::move(ring)),
      dq_THd_(s.scratch("dq of other chunks", DType::kF32, {x.q_THd.rows(), x.q_THd.cols()})) {
  ops::run(s, ops::Fill{.x = dq_THd_, .value = 0.0f});
  while (ring_->next()) {
    const OwnTokens own = ring_->own();
    ops::run(s, ops::SoftmaxFarBackward{.dq_THd = own.rows(dq_THd_),
                                        .dk_THd = ring_->dk(),
                                        .dv_THd = ring_->dv(),
                                        .do_THd = own.rows(do_THd),
                                        .o_THd = own.rows(o_THd),
                                        .lse_HT = own.per_head(lse_HT),
                                        .q_THd = own.rows(x.q_THd),
                                        .k_THd = ring_->k(),
                                        .v_THd = ring_->v(),
                                        .bias = x.bias,
                                        .far = ring_->keys(),
                                        .distance = ring_->distance(),
                                        .params = x.params});
  }
}

void FarSoftmaxBackward::add_to(const SoftmaxGradients& sums) {
  const KeyRing::Home home = ring_->home();
  ops::run(s_, ops::Add{.y = sums.dq_THd, .x = dq_THd_});
  ops::run(s_, ops::Add{.y = sums.dk_THd, .x = home.dk});
  ops::run(s_, ops::Add{.y = sums.dv_THd, .x = home.dv});
}

}  // namespace sbtrain
