// Tensors for tests: owned memory, random and poisoned contents, comparison in fp64.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string_view>
#include <vector>

#include "core/philox.h"
#include "core/stream.h"
#include "core/tensor.h"

namespace sbtrain::test {

// A stream on the CPU backend with memory of its own, with which tests call ops. Released memory is
// poisoned, so that its use is noticed.
struct CpuStream {
  CpuStream() { memory.poison(); }
  Memory memory{Backend::kCpu};
  Stream stream{memory};
  operator Stream&() { return stream; }  // NOLINT: passed to ops as a stream
};

// A tensor that owns its memory. With `gap` > 0 its rows are strided: `gap` elements that no op
// may touch lie after each row (see gaps_intact). Everything starts poisoned: NaN as f32, a
// large negative number as i32.
class Owned {
 public:
  Owned(DType dtype, std::vector<int64_t> shape, int64_t gap = 0) {
    view_ = Tensor(nullptr, dtype, shape);
    view_.row_stride = view_.cols() + gap;
    storage_.assign(static_cast<size_t>(view_.rows() * view_.row_stride), kPoison);
    view_.data = storage_.data();
  }
  Owned(const Owned& other) : storage_(other.storage_), view_(other.view_) {
    view_.data = storage_.data();
  }
  Owned& operator=(const Owned&) = delete;

  operator const Tensor&() const { return view_; }  // NOLINT: used as its tensor
  const Tensor& tensor() const { return view_; }
  float* f32() const { return view_.f32(); }
  int32_t* i32() const { return view_.i32(); }
  float& at(int64_t row, int64_t col) { return view_.f32()[row * view_.row_stride + col]; }

  // Whether the elements between the rows still have the values of the constructor.
  bool gaps_intact() const {
    for (int64_t r = 0; r < view_.rows(); ++r) {
      for (int64_t c = view_.cols(); c < view_.row_stride; ++c) {
        if (storage_[static_cast<size_t>(r * view_.row_stride + c)] != kPoison) return false;
      }
    }
    return true;
  }

 private:
  static constexpr uint32_t kPoison = 0xffc0dead;
  std::vector<uint32_t> storage_;
  Tensor view_;
};

inline Owned poisoned(std::vector<int64_t> shape, int64_t gap = 0) {
  return {DType::kF32, std::move(shape), gap};
}

// Element (row, col) is f(row * cols + col).
inline Owned generated(std::vector<int64_t> shape, int64_t gap,
                       const std::function<double(int64_t)>& f) {
  Owned out(DType::kF32, std::move(shape), gap);
  const int64_t cols = out.tensor().cols();
  for (int64_t r = 0; r < out.tensor().rows(); ++r) {
    for (int64_t c = 0; c < cols; ++c) out.at(r, c) = static_cast<float>(f(r * cols + c));
  }
  return out;
}

inline Owned constant(std::vector<int64_t> shape, double value, int64_t gap = 0) {
  return generated(std::move(shape), gap, [&](int64_t) { return value; });
}

// Normal numbers that depend only on `name` and the element's index.
inline Owned random_normal(std::string_view name, std::vector<int64_t> shape, double std = 1.0,
                           double mean = 0.0, int64_t gap = 0) {
  const Philox random(1, RandomPurpose::kTest, name);
  return generated(std::move(shape), gap,
                   [&](int64_t i) { return mean + std * random.normal(static_cast<uint64_t>(i)); });
}

inline Owned integers(const std::vector<int32_t>& values) {
  Owned out(DType::kI32, {static_cast<int64_t>(values.size())});
  if (!values.empty()) std::memcpy(out.i32(), values.data(), values.size() * sizeof(int32_t));
  return out;
}

// Uniform in [0, bound).
inline Owned random_integers(std::string_view name, int64_t count, int32_t bound) {
  const Philox random(1, RandomPurpose::kTest, name);
  std::vector<int32_t> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<int32_t>(random.uniform(i) * bound);
  }
  return integers(values);
}

// The elements of an f32 or i32 tensor, row by row.
inline std::vector<double> to_f64(const Tensor& t) {
  std::vector<double> out;
  out.reserve(static_cast<size_t>(t.numel()));
  for (int64_t r = 0; r < t.rows(); ++r) {
    for (int64_t c = 0; c < t.cols(); ++c) {
      const int64_t i = r * t.row_stride + c;
      out.push_back(t.dtype == DType::kI32 ? t.i32()[i] : static_cast<double>(t.f32()[i]));
    }
  }
  return out;
}

// a + b, element by element.
inline std::vector<double> plus(std::vector<double> a, const std::vector<double>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

// The error of a result relative to its reference: in the Frobenius norm, and as the largest
// difference over the largest element. Absolute if the reference is zero; infinite for NaN or
// different sizes.
struct RelativeErrors {
  double frobenius = std::numeric_limits<double>::infinity();
  double largest = std::numeric_limits<double>::infinity();
};
inline RelativeErrors relative_errors(const std::vector<double>& actual,
                                      const std::vector<double>& reference) {
  if (actual.size() != reference.size()) return {};
  double squares = 0;
  double largest = 0;
  double reference_squares = 0;
  double reference_largest = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double d = std::abs(actual[i] - reference[i]);
    if (std::isnan(d)) return {};
    squares += d * d;
    largest = std::max(largest, d);
    reference_squares += reference[i] * reference[i];
    reference_largest = std::max(reference_largest, std::abs(reference[i]));
  }
  if (!(reference_largest > 0)) return {std::sqrt(squares), largest};
  return {std::sqrt(squares / reference_squares), largest / reference_largest};
}

// What tests bound: the error in the Frobenius norm, and half of the largest, so that a few wrong
// elements among many right ones show. A single element may have twice the error of the whole: its
// own rounding is not averaged. (FlashAttention's tests allow twice as well.)
inline double relative_error(const std::vector<double>& actual,
                             const std::vector<double>& reference) {
  const RelativeErrors errors = relative_errors(actual, reference);
  return std::max(errors.frobenius, errors.largest / 2);
}

inline double relative_error(const Tensor& actual, const std::vector<double>& reference) {
  return relative_error(to_f64(actual), reference);
}

// Equal shapes and equal bits, signs of zero and NaN payloads included.
inline bool bitwise_equal(const Tensor& a, const Tensor& b) {
  if (a.dtype != b.dtype || a.rows() != b.rows() || a.cols() != b.cols()) return false;
  const size_t size = dtype_size(a.dtype);
  for (int64_t r = 0; r < a.rows(); ++r) {
    const auto* row_a = static_cast<const std::byte*>(a.data) + r * a.row_stride * size;
    const auto* row_b = static_cast<const std::byte*>(b.data) + r * b.row_stride * size;
    if (std::memcmp(row_a, row_b, static_cast<size_t>(a.cols()) * size) != 0) return false;
  }
  return true;
}

// Central differences of a scalar function in fp64.
inline std::vector<double> numeric_gradient(
    const std::function<double(const std::vector<double>&)>& f, std::vector<double> x,
    double step = 1e-5) {
  std::vector<double> gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double value = x[i];
    x[i] = value + step;
    const double above = f(x);
    x[i] = value - step;
    const double below = f(x);
    x[i] = value;
    gradient[i] = (above - below) / (2 * step);
  }
  return gradient;
}

}  // namespace sbtrain::test
