#include "attention/softmax_ring.h"

#include "ops/memory.h"

namespace sbtrain {

void add_far_softmax(Stream& s, const Tensor& o_THd, const Tensor& lse_HT, const FarSoftmax& x,
                     KeyRing& ring) {
  // Sums are f32.
  Buffer sums;
  const bool apart = o_THd.dtype != DType::kF32;
  if (apart) {
    sums = s.scratch("o of other ranks", DType::kF32, {o_THd.rows(), o_THd.cols()});
    ops::run(s, ops::Copy{.y = sums, .x = o_THd});
  }
  while (ring.next()) {
    ops::run(s, ops::SoftmaxFarForward{.o_THd = apart ? sums.tensor() : o_THd,
                                       .lse_HT = lse_HT,
                                       .q_THd = x.q_THd,
                                       .k_THd = ring.k(),
                                       .v_THd = ring.v(),
                                       .bias = x.bias,
                                       .far = ring.keys(),
                                       .distance = ring.distance(),
                                       .params = x.params});
  }
  if (apart) ops::run(s, ops::Copy{.y = o_THd, .x = sums});
}

void far_softmax_backward(Stream& s, const SoftmaxGradients& sums, const Tensor& do_THd,
                          const Tensor& o_THd, const Tensor& lse_HT, const FarSoftmax& x,
                          const ContextShare& share) {
  KeyRing ring(s, share, x.k_THd, x.v_THd, KeyRing::Order::kFarthestFirst);
  const Buffer dq = s.scratch("dq of other ranks", DType::kF32, {x.q_THd.rows(), x.q_THd.cols()});
  KeyGradientRing keys(s, share, x.k_THd);
  ops::run(s, ops::Fill{.x = dq, .value = 0.0f});
  while (ring.next()) {
    keys.next();
    ops::run(s, ops::SoftmaxFarBackward{.dq_THd = dq,
                                        .dk_THd = keys.dk(),
                                        .dv_THd = keys.dv(),
                                        .do_THd = do_THd,
                                        .o_THd = o_THd,
                                        .lse_HT = lse_HT,
                                        .q_THd = x.q_THd,
                                        .k_THd = ring.k(),
                                        .v_THd = ring.v(),
                                        .bias = x.bias,
                                        .far = ring.keys(),
                                        .distance = ring.distance(),
                                        .params = x.params});
  }
  keys.home();
  ops::run(s, ops::Add{.y = sums.dq_THd, .x = dq});
  ops::run(s, ops::Add{.y = sums.dk_THd, .x = keys.dk()});
  ops::run(s, ops::Add{.y = sums.dv_THd, .x = keys.dv()});
}

}  // namespace sbtrain
