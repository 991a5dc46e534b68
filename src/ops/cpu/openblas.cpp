#include "ops/cpu/openblas.h"

#include <dlfcn.h>
#include <omp.h>

#include <cstdlib>

#include "core/error.h"

namespace sbtrain::ops::cpu {
namespace {

constexpr const char* kCoreType = "OPENBLAS_CORETYPE";

void* open_library() {
  // The build found the OpenMP variant by its folder; on other systems the default is used.
  for (const char* path : {SBTRAIN_OPENBLAS_LIBRARY, "libopenblas.so.0"}) {
    if (void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  fail(ExitCode::kConfig, "cannot load OpenBLAS ({}): install libopenblas0-openmp", dlerror());
}

template <typename Function>
Function symbol(void* library, const char* name) {
  void* address = dlsym(library, name);
  if (!address) fail(ExitCode::kConfig, "OpenBLAS has no {}: install another version", name);
  return reinterpret_cast<Function>(address);
}

std::string core_name(void* library) {
  return symbol<decltype(&openblas_get_corename)>(library, "openblas_get_corename")();
}

// The kernels that OpenBLAS should have chosen, if `core` is its fallback for processors that it
// does not know; otherwise nullptr.
const char* better_core(const std::string& core) {
#if defined(__x86_64__)
  if (core != "Prescott" && core != "Nehalem" && core != "Barcelona") return nullptr;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return "SkylakeX";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "Haswell";
#endif
  return nullptr;
}

OpenBlas load() {
  void* library = open_library();
  const char* better = std::getenv(kCoreType) ? nullptr : better_core(core_name(library));
  if (better) {
    dlclose(library);
    setenv(kCoreType, better, 1);
    library = open_library();
    unsetenv(kCoreType);
  }
  OpenBlas blas;
  blas.sgemm = symbol<decltype(&cblas_sgemm)>(library, "cblas_sgemm");
  blas.sgemv = symbol<decltype(&cblas_sgemv)>(library, "cblas_sgemv");
  blas.core = core_name(library);
  // This program spreads the work over threads itself: OpenBLAS's own would wait for each other at
  // every call. Its OpenMP build sets the whole program's number of threads too, so restore that.
  const int threads = omp_get_max_threads();
  symbol<decltype(&openblas_set_num_threads)>(library, "openblas_set_num_threads")(1);
  omp_set_num_threads(threads);
  return blas;
}

}  // namespace

const OpenBlas& openblas() {
  static const OpenBlas kOpenBlas = load();
  return kOpenBlas;
}

}  // namespace sbtrain::ops::cpu
