// How element-wise ops are spread over threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "core/tensor.h"

namespace sbtrain::ops::cpu {

// Below this many elements for each thread, waking the threads costs more than it saves.
inline constexpr int64_t kElementsPerThread = int64_t{1} << 13;

// The number of parts into which `elements` of work are cut. A parallel region always runs with all
// threads, however few the parts are: libgomp ends the threads that a smaller team leaves out.
inline int parallel_parts(int64_t elements) {
  if (omp_in_parallel()) return 1;
  return static_cast<int>(
      std::clamp<int64_t>(elements / kElementsPerThread, 1, omp_get_max_threads()));
}

// Calls body(begin, end) for consecutive ranges that cover [0, rows), in parallel when that pays.
// `body` must treat rows independently and not throw.
template <typename Body>
void parallel_rows(int64_t rows, int64_t elements_per_row, Body&& body) {
  const int parts = parallel_parts(rows * elements_per_row);
  if (parts == 1) {
    body(int64_t{0}, rows);
    return;
  }
#pragma omp parallel for schedule(static)
  for (int part = 0; part < parts; ++part) {
    body(rows * part / parts, rows * (part + 1) / parts);
  }
}

// Calls body(y, x, count) for contiguous runs of elements that cover two tensors of one shape.
template <typename Y, typename X, typename Body>
void parallel_runs(const Tensor& y, Y* y_data, const Tensor& x, X* x_data, Body&& body) {
  if (y.contiguous() && x.contiguous()) {
    constexpr int64_t kRun = 1024;
    const int64_t n = y.numel();
    parallel_rows((n + kRun - 1) / kRun, kRun, [&](int64_t begin, int64_t end) {
      body(y_data + begin * kRun, x_data + begin * kRun, std::min(n, end * kRun) - begin * kRun);
    });
    return;
  }
  parallel_rows(y.rows(), y.cols(), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      body(y_data + r * y.row_stride, x_data + r * x.row_stride, y.cols());
    }
  });
}

}  // namespace sbtrain::ops::cpu
