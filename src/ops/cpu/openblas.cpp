#include "ops/cpu/openblas.h"

#include <dlfcn.h>
#include <omp.h>
#include <sys/mman.h>

#include <cstdlib>
#include <optional>
#include <vector>

#include "core/error.h"
#include "core/host_memory.h"

namespace sbtrain::ops::cpu {
namespace {

constexpr const char* kCoreType = "OPENBLAS_CORETYPE";
constexpr const char* kThreads = "OPENBLAS_NUM_THREADS";

// More than OpenBLAS maps while it is loaded with one thread: its code and two buffers of 128 MiB.
constexpr size_t kLoadBytes = size_t{512} << 20;
// Twice the size of a buffer, so that some memory is left for everything else.
constexpr size_t kBufferBytes = size_t{256} << 20;

// OpenBLAS maps its memory in a loop that ends only when it succeeds, so this asks first.
void require_mappable(size_t bytes, int threads) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data != MAP_FAILED) {
    munmap(data, bytes);
    return;
  }
  fail(ExitCode::kOutOfMemory,
       "out of memory: matrix products take 128 MiB of addresses in each of {} threads, and {} "
       "leaves "
       "too little; raise that limit, or set OMP_NUM_THREADS to fewer threads",
       threads, host_memory().limit);
}

// A variable of the environment, set while this object lives.
class TemporaryVariable {
 public:
  TemporaryVariable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value, 1);
  }
  ~TemporaryVariable() { before_ ? setenv(name_, before_->c_str(), 1) : unsetenv(name_); }
  TemporaryVariable(const TemporaryVariable&) = delete;
  TemporaryVariable& operator=(const TemporaryVariable&) = delete;

 private:
  const char* name_;
  std::optional<std::string> before_;
};

void* open_library() {
  require_mappable(kLoadBytes, 1);
  const TemporaryVariable one_thread(kThreads,
                                     "1");  // it makes buffers for each while it is loaded
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
    const TemporaryVariable core(kCoreType, better);
    library = open_library();
  }
  OpenBlas blas;
  blas.sgemm = symbol<decltype(&cblas_sgemm)>(library, "cblas_sgemm");
  blas.sgemv = symbol<decltype(&cblas_sgemv)>(library, "cblas_sgemv");
  blas.core = core_name(library);
  blas.take_buffer = reinterpret_cast<void* (*)(int)>(dlsym(library, "blas_memory_alloc"));
  blas.return_buffer = reinterpret_cast<void (*)(void*)>(dlsym(library, "blas_memory_free"));
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

void reserve_buffers(int threads) {
  const OpenBlas& blas = openblas();
  if (blas.take_buffer == nullptr || blas.return_buffer == nullptr) return;
  std::vector<void*> taken;
  const auto give_back = [&] {
    for (void* buffer : taken) blas.return_buffer(buffer);
  };
  try {
    for (int n = 0; n < threads; ++n) {
      require_mappable(kBufferBytes, threads);
      taken.push_back(blas.take_buffer(0));
    }
  } catch (...) {
    give_back();
    throw;
  }
  give_back();  // they stay mapped, for the products that come
}

}  // namespace sbtrain::ops::cpu
