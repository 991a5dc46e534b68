// What the dispatchers share: checks that tensors fit, and the switch on the backend.
#pragma once

#include <string_view>

#include "core/device.h"
#include "core/error.h"
#include "core/stream.h"
#include "core/tensor.h"
#include "ops/cuda/timer.h"

namespace sbtrain::ops {

// Reals may be f32 or bf16: on (or planned for) a GPU activations and weights are bf16, gradients
// f32. Kernels take typed pointers, which throws where a backend has no such mixture.
inline bool type_fits(DType actual, DType expected) {
  const auto real = [](DType t) { return t == DType::kF32 || t == DType::kBF16; };
  return actual == expected || (real(actual) && real(expected));
}

// `t` is a matrix of `rows` x `cols`; its rows may be strided. The message names op and tensor.
inline void check_matrix(std::string_view op, std::string_view name, const Tensor& t, DType dtype,
                         int64_t rows, int64_t cols) {
  const bool fits = t.defined() && type_fits(t.dtype, dtype) && t.rows() == rows &&
                    t.cols() == cols && t.row_stride >= cols;
  if (fits) return;
  fail(ExitCode::kInternal, "{}: {} must be {}[{}, {}], got {}", op, name, dtype_name(dtype), rows,
       cols, t.describe());
}

// `t` is contiguous and holds `numel` elements, in any shape.
inline void check_flat(std::string_view op, std::string_view name, const Tensor& t, DType dtype,
                       int64_t numel) {
  if (t.defined() && type_fits(t.dtype, dtype) && t.numel() == numel && t.contiguous()) return;
  fail(ExitCode::kInternal, "{}: {} must be {} contiguous {} elements, got {} (row stride {})", op,
       name, numel, dtype_name(dtype), t.describe(), t.row_stride);
}

inline void check_same_shape(std::string_view op, std::string_view name, const Tensor& t,
                             const Tensor& like) {
  check_matrix(op, name, t, like.dtype, like.rows(), like.cols());
}

// Runs `cpu` or `cuda` on these backends; when only memory is planned, `plan`, which takes the
// scratch that the op takes on the stream's target.
template <typename Cpu, typename Cuda, typename Plan>
void dispatch(const Stream& s, std::string_view op, Cpu&& cpu, [[maybe_unused]] Cuda&& run_cuda,
              Plan&& plan) {
  switch (s.backend()) {
    case Backend::kPlan:
      return plan();
    case Backend::kCpu: {
      const OpTimer timer(s.profile(), op);
      return cpu();
    }
    case Backend::kCuda:
      break;
  }
  if constexpr (kHasCuda) {
    const cuda::DeviceTimer timer(s, op);
    run_cuda();
  } else {
    fail(ExitCode::kInternal, "{}: this build has no {} backend", op, backend_name(s.backend()));
  }
}

// For ops that take no scratch.
template <typename Cpu, typename Cuda>
void dispatch(const Stream& s, std::string_view op, Cpu&& cpu, Cuda&& cuda) {
  dispatch(s, op, std::forward<Cpu>(cpu), std::forward<Cuda>(cuda), [] {});
}

}  // namespace sbtrain::ops
