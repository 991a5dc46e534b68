// OpenBLAS, loaded at run time rather than linked. It chooses its kernels for the processor while
// it is loaded, and a release older than the processor chooses those for a Pentium 4 (Prescott),
// which are five times slower: Debian 12's does so on Intel's Emerald Rapids. The only way to
// correct the choice is an environment variable that must be set before the library is loaded.
#pragma once

#include <cblas.h>

#include <string>

namespace sbtrain::ops::cpu {

struct OpenBlas {
  decltype(&cblas_sgemm) sgemm = nullptr;
  decltype(&cblas_sgemv) sgemv = nullptr;
  std::string core;  // whose kernels it runs, such as "SkylakeX"
  // Takes and returns a buffer of the kind that each running product uses; null in releases that do
  // not export them.
  void* (*take_buffer)(int) = nullptr;
  void (*return_buffer)(void*) = nullptr;
};

// Single-threaded OpenBLAS, loaded on the first call. OPENBLAS_CORETYPE in the environment takes
// precedence over the correction. Throws ExitCode::kConfig when the library cannot be loaded,
// ExitCode::kOutOfMemory when there is no memory for it.
const OpenBlas& openblas();

// Makes OpenBLAS allocate the buffers with which `threads` threads at once multiply; it would do so
// when they are first needed, and try for ever if there is no memory. Throws
// ExitCode::kOutOfMemory if there is too little. Not to be called from parallel regions.
void reserve_buffers(int threads);

}  // namespace sbtrain::ops::cpu
