// The ops of ops/coca.h on CUDA.
#pragma once

#include "ops/coca.h"

namespace sbtrain::ops::cuda {

void coca_query(Stream& s, const Tensor& y_THd, const Tensor& q_THd, const Tensor& positions_T,
                const CocaParams& params);
void coca_query_backward(Stream& s, const Tensor& dq_THd, const Tensor& dy_THd, const Tensor& q_THd,
                         const Tensor& positions_T, const CocaParams& params);
void coca_key(Stream& s, const Tensor& y_THd, const Tensor& t_THd, const Tensor& positions_T,
              const CocaParams& params);
void coca_key_backward(Stream& s, const Tensor& dt_THd, const Tensor& dy_THd, const Tensor& y_THd,
                       const Tensor& positions_T, const CocaParams& params);

}  // namespace sbtrain::ops::cuda
