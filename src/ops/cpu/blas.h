// Matrix products in fp32, row-major, on OpenBLAS.
#pragma once

#include <cstdint>

namespace sbtrain::ops::cpu {

enum class Transpose : uint8_t { kNo, kYes };

// C_MN = alpha * op(A)_MK op(B)_KN + beta * C_MN, where op transposes with kYes. `lda`, `ldb` and
// `ldc` are the elements between rows as the matrices lie in memory (A is [K, M] with kYes).
// With beta = 0 what C holds is never read, NaN included.
//
// gemm_serial runs on the calling thread and may be called inside parallel regions.
void gemm_serial(Transpose trans_a, Transpose trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                 const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
                 int64_t ldc);

// The same, with the output cut into one rectangle per OpenMP thread. The cut depends on the
// shape and the number of threads alone, so results are the same on every run. Inside a parallel
// region it is gemm_serial.
void gemm(Transpose trans_a, Transpose trans_b, int64_t m, int64_t n, int64_t k, float alpha,
          const float* a, int64_t lda, const float* b, int64_t ldb, float beta, float* c,
          int64_t ldc);

}  // namespace sbtrain::ops::cpu
