// The functions of cuBLASLt, whose library of 540 MB is loaded when the first product runs on a
// GPU.
#pragma once

#include <cublasLt.h>

namespace sbtrain::ops::cuda {

#define SBTRAIN_CUBLAS_LT_FUNCTIONS(F) \
  F(Create)                            \
  F(Destroy)                           \
  F(GetStatusString)                   \
  F(GetVersion)                        \
  F(Matmul)                            \
  F(MatmulAlgoCheck)                   \
  F(MatmulAlgoGetHeuristic)            \
  F(MatmulDescCreate)                  \
  F(MatmulDescDestroy)                 \
  F(MatmulDescSetAttribute)            \
  F(MatmulPreferenceCreate)            \
  F(MatmulPreferenceDestroy)           \
  F(MatmulPreferenceSetAttribute)      \
  F(MatrixLayoutCreate)                \
  F(MatrixLayoutDestroy)

// cublas_lt().Create is cublasLtCreate, and so on.
struct CublasLt {
// A name cannot stand in parentheses where it is declared.
// NOLINTNEXTLINE(bugprone-macro-parentheses)
#define SBTRAIN_MEMBER(name) decltype(&::cublasLt##name) name = nullptr;
  SBTRAIN_CUBLAS_LT_FUNCTIONS(SBTRAIN_MEMBER)
#undef SBTRAIN_MEMBER
};

// Throws ExitCode::kConfig where the library is missing.
const CublasLt& cublas_lt();

}  // namespace sbtrain::ops::cuda
