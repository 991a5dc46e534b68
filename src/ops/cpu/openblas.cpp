#include "ops/cpu/openblas.h"

#include <omp.h>
#include <sys/mman.h>

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <sstream>
#include <vector>

#include "core/error.h"
#include "core/host_memory.h"
#include "core/shared_library.h"
#include "ops/libraries.h"

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

SharedLibrary open_library() {
  require_mappable(kLoadBytes, 1);
  // It makes buffers for each thread while it is loaded.
  const TemporaryVariable one_thread(kThreads, "1");
  // A package brings its own, which shares the program's OpenMP. The build found the OpenMP variant
  // by its folder; on other systems the default is used.
  std::error_code none;
  const std::filesystem::path own =
      std::filesystem::read_symlink("/proc/self/exe", none).parent_path().parent_path() /
      "lib/sbtrain/libopenblas.so.0";
  if (std::filesystem::exists(own, none)) {
    return SharedLibrary("OpenBLAS", {own.c_str()}, "install sbtrain again");
  }
  return SharedLibrary("OpenBLAS", {SBTRAIN_OPENBLAS_LIBRARY, "libopenblas.so.0"},
                       "install libopenblas0-openmp");
}

std::string core_name(const SharedLibrary& library) {
  decltype(&openblas_get_corename) name = nullptr;
  library.find(name, "openblas_get_corename");
  return name();
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
  SharedLibrary library = open_library();
  const char* better = std::getenv(kCoreType) ? nullptr : better_core(core_name(library));
  if (better) {
    library.unload();
    const TemporaryVariable core(kCoreType, better);
    library = open_library();
  }
  OpenBlas blas;
  library.find(blas.sgemm, "cblas_sgemm");
  library.find(blas.sgemv, "cblas_sgemv");
  blas.core = core_name(library);
  library.find_if_there(blas.take_buffer, "blas_memory_alloc");
  library.find_if_there(blas.return_buffer, "blas_memory_free");
  decltype(&openblas_set_num_threads) set_num_threads = nullptr;
  library.find(set_num_threads, "openblas_set_num_threads");
  // This program spreads the work over threads itself: OpenBLAS's own would wait for each other at
  // every call. Its OpenMP build sets the whole program's number of threads too, so restore that.
  const int threads = omp_get_max_threads();
  set_num_threads(1);
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

namespace sbtrain::ops {

FoundLibrary find_openblas() {
  return look_for("OpenBLAS", [](FoundLibrary& found) {
    const std::string& core = cpu::openblas().core;
    const SharedLibrary library = cpu::open_library();
    found.path = library.path();
    decltype(&openblas_get_config) config = nullptr;
    library.find(config, "openblas_get_config");
    // Of "OpenBLAS 0.3.21 NO_LAPACKE DYNAMIC_ARCH ...", the number.
    std::string name;
    std::istringstream(config()) >> name >> found.version;
    found.version += fmt::format(" with kernels for {}", core);
  });
}

}  // namespace sbtrain::ops
