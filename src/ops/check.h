// Whether the tensors of an op fit each other.
#pragma once

#include <optional>
#include <string_view>

#include "core/error.h"
#include "core/sequences.h"
#include "core/tensor.h"

namespace sbtrain::ops {

// On the CPU reals are f32; on a GPU, or when planned for one, activations and weights are bf16.
inline bool is_real(DType t) {
  return t == DType::kF32 || t == DType::kBF16;
}

// The checks of one op. Messages name the op and the tensor. An expected type is meant exactly:
// bf16 does not stand for f32, nor f32 for bf16. Without one, either will do; an op leaves it out
// for its first tensor, of which the others take their type, and where it converts.
class Check {
 public:
  explicit Check(std::string_view op) : op_(op) {}

  // `t` is a matrix of `rows` x `cols`; its rows may be strided.
  void matrix(std::string_view name, const Tensor& t, int64_t rows, int64_t cols,
              std::optional<DType> dtype = {}) const {
    const bool fits = t.defined() && type_fits(t.dtype, dtype) && t.rows() == rows &&
                      t.cols() == cols && t.row_stride >= cols;
    if (fits) return;
    fail(ExitCode::kInternal, "{}: {} must be {}[{}, {}], got {}", op_, name, type_name(dtype),
         rows, cols, t.describe());
  }
  void matrix(std::string_view name, const Tensor& t) const { matrix(name, t, t.rows(), t.cols()); }
  void same(std::string_view name, const Tensor& t, const Tensor& like) const {
    matrix(name, t, like.rows(), like.cols(), like.dtype);
  }
  // `t` is contiguous and holds `numel` elements, in any shape.
  void flat(std::string_view name, const Tensor& t, int64_t numel,
            std::optional<DType> dtype = {}) const {
    if (t.defined() && type_fits(t.dtype, dtype) && t.numel() == numel && t.contiguous()) return;
    fail(ExitCode::kInternal, "{}: {} must be {} contiguous {} elements, got {} (row stride {})",
         op_, name, numel, type_name(dtype), t.describe(), t.row_stride);
  }
  // `x` is [rows, heads * d]; returns d.
  int64_t heads(std::string_view name, const Tensor& x, int64_t rows, int heads,
                std::optional<DType> dtype = {}) const {
    matrix(name, x, rows, x.cols(), dtype);
    if (heads > 0 && x.cols() % heads == 0) return x.cols() / heads;
    fail(ExitCode::kInternal, "{}: {} heads do not divide {} {}", op_, heads, name, x.describe());
  }
  void documents(const Sequences& sequences, int64_t tokens) const {
    const Tensor& bounds = sequences.cu_seqlens;
    if (bounds.defined() && bounds.dtype == DType::kI32 && bounds.contiguous() &&
        sequences.count >= 0 && bounds.numel() > sequences.count &&
        (tokens == 0 || sequences.max_seqlen > 0)) {
      return;
    }
    fail(ExitCode::kInternal, "{}: {} documents of at most {} tokens need i32 cu_seqlens, got {}",
         op_, sequences.count, sequences.max_seqlen, bounds.describe());
  }
  void that(bool condition, std::string_view what) const {
    if (!condition) fail(ExitCode::kInternal, "{}: {}", op_, what);
  }

 private:
  static bool type_fits(DType actual, std::optional<DType> expected) {
    return expected ? actual == *expected : is_real(actual);
  }
  static std::string_view type_name(std::optional<DType> dtype) {
    return dtype ? dtype_name(*dtype) : "f32 or bf16";
  }

  std::string_view op_;
};

}  // namespace sbtrain::ops
