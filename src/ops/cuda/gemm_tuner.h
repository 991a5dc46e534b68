// Matrix products by cuBLASLt, each with the algorithm that was fastest when it was timed, among
// those that give the same bits as cuBLASLt's first suggestion. Most algorithms differ in the shape
// of their tiles alone; those that add up the inner dimension in another order (split-K) are left
// out, so that what a product gives depends on the type of GPU and the version of cuBLASLt, and not
// on which algorithm happened to be fastest that day.
//
// Choices are kept by GPU, cuBLASLt version and shape, in memory and on disk
// ($XDG_CACHE_HOME or ~/.cache, sbtrain/gemm-5.txt). A run folder keeps its own copy (text(),
// add()), so that a resumed run computes as it did before, whatever version had begun it.
#pragma once

#include <compare>
#include <map>
#include <memory>
#include <string>

#include "core/tensor.h"
#include "ops/cuda/cublas_lt.h"

namespace sbtrain::ops::cuda {

// y[M, N] = alpha * a b + beta * c, where a is [M, K] (or, transposed, [K, M]) and b is [K, N] (or
// [N, K]). a and b are bf16, or both fp8, and then multiplied by the numbers on the device that
// their inverse scales point to; y and c share a type, bf16 or f32. Rows may be strided; nothing is
// copied.
struct Gemm {
  Tensor y, a, b;
  bool transpose_a = false, transpose_b = false;
  float alpha = 1, beta = 0;
  Tensor c{};  // y itself if undefined
  // Of fp8 alone, as ops/fp8.h has them.
  const float* a_inverse_scale = nullptr;
  const float* b_inverse_scale = nullptr;
  bool fast_accumulation = false;
};

// D = alpha op(A) op(B) + beta C in cuBLAS's column-major terms; D is m x n, the inner dimension k.
struct GemmShape {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 0, ldb = 0, ldc = 0, ldd = 0;
  bool f32_output = false;  // of C and D
  bool adds = false;        // beta is not 0
  int alignment = 16;       // of every pointer, bytes
  DType a = DType::kBF16, b = DType::kBF16;
  bool fast_accumulation = false;
  auto operator<=>(const GemmShape&) const = default;  // NOLINT: takes it for a null pointer
};

class GemmTuner {
 public:
  GemmTuner();
  ~GemmTuner();

  // Reads the choices of this GPU from the cache on disk.
  void open(const std::string& device);
  // With `search`, a shape that has no choice yet is timed, which overwrites y; otherwise
  // cuBLASLt's first suggestion is taken.
  void run(cublasLtHandle_t blas, cudaStream_t stream, const Gemm& g, const Tensor& workspace,
           bool search);
  // Writes new choices to the cache on disk; a cache that cannot be written is no error.
  void save() const;

  std::string text() const;
  void add(const std::string& text);  // these take precedence over existing choices

 private:
  struct Plan;
  std::string key(const GemmShape& shape) const;
  Plan& plan(cublasLtHandle_t blas, const GemmShape& shape, size_t workspace_bytes);
  void time_candidates(cublasLtHandle_t blas, cudaStream_t stream, Plan& plan, const Gemm& g,
                       const Tensor& workspace);

  std::string device_;
  std::map<GemmShape, std::unique_ptr<Plan>> plans_;
  std::map<std::string, std::string> choices_;  // key -> algorithm, hexadecimal
  bool changed_ = false;
};

}  // namespace sbtrain::ops::cuda
