#include "ops/cuda/gemm_tuner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <vector>

#include "core/error.h"
#include "core/files.h"
#include "core/log.h"
#include "kernels/checksum.h"
#include "ops/cuda/context.h"

namespace sbtrain::ops::cuda {
namespace {

namespace fs = std::filesystem;

constexpr int kCandidates = 12;
constexpr int kShortCandidates = 32;  // of products that are timed quickly
constexpr int kTimedRuns = 4;
constexpr int kRecordedRuns = 32;
constexpr float kShort = 0.02f;  // ms

// The number grows when choices are made in a better way, so that those of older versions are not
// taken any longer.
constexpr const char* kCacheName = "gemm-5.txt";

fs::path cache_file() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && *cache) {
    return fs::path(cache) / "sbtrain" / kCacheName;
  }
  const char* home = std::getenv("HOME");
  return home && *home ? fs::path(home) / ".cache" / "sbtrain" / kCacheName : fs::path();
}

std::string text_of_file(const fs::path& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Choices in the form of a file: a line for each, with a tab between key and algorithm.
using Choices = std::map<std::string, std::string>;
std::string text_of(const Choices& choices) {
  std::string text;
  for (const auto& [key, algorithm] : choices) text += fmt::format("{}\t{}\n", key, algorithm);
  return text;
}
Choices choices_of(const std::string& text) {
  Choices choices;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    if (tab != std::string::npos) choices[line.substr(0, tab)] = line.substr(tab + 1);
  }
  return choices;
}

std::string to_hex(const cublasLtMatmulAlgo_t& algorithm) {
  std::string text;
  for (const uint64_t word : algorithm.data) text += fmt::format("{:016x}", word);
  return text;
}

bool from_hex(const std::string& text, cublasLtMatmulAlgo_t& algorithm) {
  constexpr size_t kWords = std::size(cublasLtMatmulAlgo_t{}.data);
  if (text.size() != 16 * kWords) return false;
  if (text.find_first_not_of("0123456789abcdef") != std::string::npos) return false;
  for (size_t i = 0; i < kWords; ++i) {
    algorithm.data[i] = std::stoull(text.substr(16 * i, 16), nullptr, 16);
  }
  return true;
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return CUDA_R_32F;
    case DType::kE4M3:
      return CUDA_R_8F_E4M3;
    case DType::kE5M2:
      return CUDA_R_8F_E5M2;
    default:
      return CUDA_R_16BF;
  }
}

cublasLtMatrixLayout_t layout(DType dtype, int64_t rows, int64_t cols, int64_t ld) {
  cublasLtMatrixLayout_t out = nullptr;
  SBTRAIN_CUBLAS_CHECK(cublas_lt().MatrixLayoutCreate(&out, type_of(dtype), rows, cols, ld));
  return out;
}

int alignment_of(const Tensor& t) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(t.data) |
                         static_cast<uintptr_t>(t.row_stride) * dtype_size(t.dtype);
  int alignment = 16;
  while (alignment > 2 && bits % static_cast<uintptr_t>(alignment) != 0) alignment /= 2;
  return alignment;
}

const Tensor& added(const Gemm& g) {
  return g.c.defined() ? g.c : g.y;
}

// cuBLASLt sees column-major matrices: a row-major y = a b is y^T = b^T a^T there, so b comes
// first.
GemmShape shape_of(const Gemm& g) {
  const Tensor& c = added(g);
  return {.transpose_a = g.transpose_b,
          .transpose_b = g.transpose_a,
          .m = g.y.cols(),
          .n = g.y.rows(),
          .k = g.transpose_a ? g.a.rows() : g.a.cols(),
          .lda = g.b.row_stride,
          .ldb = g.a.row_stride,
          .ldc = c.row_stride,
          .ldd = g.y.row_stride,
          .f32_output = g.y.dtype == DType::kF32,
          .adds = g.beta != 0,
          .alignment =
              std::min({alignment_of(g.a), alignment_of(g.b), alignment_of(c), alignment_of(g.y)}),
          .a = g.b.dtype,
          .b = g.a.dtype,
          .fast_accumulation = g.fast_accumulation};
}

// Times work on a stream, in ms.
class StreamTimer {
 public:
  explicit StreamTimer(cudaStream_t stream) : stream_(stream) {
    SBTRAIN_CUDA_CHECK(cudaEventCreate(&begin_));
    SBTRAIN_CUDA_CHECK(cudaEventCreate(&end_));
  }
  ~StreamTimer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  StreamTimer(const StreamTimer&) = delete;
  StreamTimer& operator=(const StreamTimer&) = delete;

  // Of one of `runs` calls.
  template <typename Work>
  float time(int runs, Work&& work) {
    return timed([&] {
             for (int i = 0; i < runs; ++i) work();
           }) /
           static_cast<float>(runs);
  }
  // The same, of a graph of the calls (core/graph.h): to launch a short kernel takes longer than
  // it runs. 0 if the work cannot be recorded.
  template <typename Work>
  float time_recorded(int runs, Work&& work) {
    if (cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed) != cudaSuccess) return 0;
    for (int i = 0; i < runs; ++i) work();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    float milliseconds = 0;
    if (cudaStreamEndCapture(stream_, &graph) == cudaSuccess &&
        cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess &&
        cudaGraphLaunch(executable, stream_) == cudaSuccess) {
      milliseconds = timed([&] { cudaGraphLaunch(executable, stream_); });
    }
    if (executable) cudaGraphExecDestroy(executable);
    if (graph) cudaGraphDestroy(graph);
    cudaGetLastError();
    return milliseconds / static_cast<float>(runs);
  }

 private:
  template <typename Work>
  float timed(Work&& work) {
    SBTRAIN_CUDA_CHECK(cudaEventRecord(begin_, stream_));
    work();
    SBTRAIN_CUDA_CHECK(cudaEventRecord(end_, stream_));
    SBTRAIN_CUDA_CHECK(cudaEventSynchronize(end_));
    float milliseconds = 0;
    SBTRAIN_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin_, end_));
    return milliseconds;
  }

  const cudaStream_t stream_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// A number of all bits of a matrix: two results are taken to be the same if their numbers are.
class Checksum {
 public:
  explicit Checksum(cudaStream_t stream) : stream_(stream) {
    void* sum = nullptr;
    SBTRAIN_CUDA_CHECK(cudaMalloc(&sum, sizeof(uint64_t)));
    sum_ = static_cast<uint64_t*>(sum);
  }
  ~Checksum() { cudaFree(sum_); }
  Checksum(const Checksum&) = delete;
  Checksum& operator=(const Checksum&) = delete;

  uint64_t of(const Tensor& x) {
    uint64_t sum = 0;
    SBTRAIN_CUDA_CHECK(cudaMemsetAsync(sum_, 0, sizeof(sum), stream_));
    kernels::launch(stream_,
                    kernels::Checksum{
                        .sum = sum_, .x = x, .type = x.dtype, .rows = x.rows(), .cols = x.cols()});
    SBTRAIN_CUDA_CHECK(cudaMemcpyAsync(&sum, sum_, sizeof(sum), cudaMemcpyDeviceToHost, stream_));
    SBTRAIN_CUDA_CHECK(cudaStreamSynchronize(stream_));
    return sum;
  }

 private:
  const cudaStream_t stream_;
  uint64_t* sum_ = nullptr;
};

}  // namespace

struct GemmTuner::Plan {
  Plan(const GemmShape& s) : shape(s) {
    SBTRAIN_CUBLAS_CHECK(cublas_lt().MatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, s.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, s.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (is_fp8(s.a)) {
      set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(s.fast_accumulation));
    }
    a = layout(s.a, s.transpose_a ? s.k : s.m, s.transpose_a ? s.m : s.k, s.lda);
    b = layout(s.b, s.transpose_b ? s.n : s.k, s.transpose_b ? s.k : s.n, s.ldb);
    const DType output = s.f32_output ? DType::kF32 : DType::kBF16;
    c = layout(output, s.m, s.n, s.ldc);
    d = layout(output, s.m, s.n, s.ldd);
  }
  template <typename Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) const {
    SBTRAIN_CUBLAS_CHECK(
        cublas_lt().MatmulDescSetAttribute(operation, attribute, &value, sizeof(value)));
  }
  // The scales' addresses are part of the operation, and differ from product to product.
  void set_scales(const Gemm& g) const {
    if (!is_fp8(shape.a)) return;
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(g.b_inverse_scale));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(g.a_inverse_scale));
  }
  ~Plan() {
    for (cublasLtMatrixLayout_t l : {a, b, c, d}) cublas_lt().MatrixLayoutDestroy(l);
    cublas_lt().MatmulDescDestroy(operation);
  }
  cublasStatus_t run(cublasLtHandle_t blas, cudaStream_t stream, const Gemm& g,
                     const Tensor& workspace, const cublasLtMatmulAlgo_t& with) const {
    return cublas_lt().Matmul(blas, operation, &g.alpha, g.b.data, a, g.a.data, b, &g.beta,
                              added(g).data, g.c.defined() ? c : d, g.y.data, d, &with,
                              workspace.data, workspace.bytes(), stream);
  }

  GemmShape shape;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
  std::vector<cublasLtMatmulAlgo_t> candidates;  // cuBLASLt's suggestions, best first
  cublasLtMatmulAlgo_t algorithm{};
  bool chosen = false;  // by timing, or read from a file
};

GemmTuner::GemmTuner() = default;
GemmTuner::~GemmTuner() = default;

std::string GemmTuner::key(const GemmShape& s) const {
  // Keys of bf16 stay as older versions wrote them.
  const std::string types = is_fp8(s.a) ? fmt::format(" {},{}{}", dtype_name(s.a), dtype_name(s.b),
                                                      s.fast_accumulation ? ",fast" : "")
                                        : "";
  return fmt::format("{} {}{}{}{} {}x{}x{} {},{},{},{} {}{}", device_, s.transpose_a ? 'T' : 'N',
                     s.transpose_b ? 'T' : 'N', s.f32_output ? 'f' : 'b', s.adds ? '+' : '=', s.m,
                     s.n, s.k, s.lda, s.ldb, s.ldc, s.ldd, s.alignment, types);
}

void GemmTuner::open(const std::string& device) {
  device_ = fmt::format("{} cublasLt-{}", device, cublas_lt().GetVersion());
  std::replace(device_.begin(), device_.end(), ' ', '-');
  add(text_of_file(cache_file()));
}

void GemmTuner::add(const std::string& text) {
  for (const auto& [name, algorithm] : choices_of(text)) {
    if (name.starts_with(device_ + " ")) choices_[name] = algorithm;
  }
  plans_.clear();  // made of earlier choices
}

std::string GemmTuner::text() const {
  return text_of(choices_);
}

void GemmTuner::save() const {
  const fs::path path = cache_file();
  if (!changed_ || path.empty()) return;
  Choices all = choices_of(text_of_file(path));
  for (const auto& [name, algorithm] : choices_) all[name] = algorithm;
  try {
    replace_file(path, text_of(all), {}, MissingFolders::kMakeAll);
  } catch (const Error& e) {  // another process may be writing it, too
    log_debug("{}; matrix products are timed again at each start", e.what());
  }
}

GemmTuner::Plan& GemmTuner::plan(cublasLtHandle_t blas, const GemmShape& shape,
                                 size_t workspace_bytes) {
  std::unique_ptr<Plan>& plan = plans_[shape];
  if (plan) return *plan;
  auto made = std::make_unique<Plan>(shape);
  cublasLtMatmulPreference_t preference = nullptr;
  SBTRAIN_CUBLAS_CHECK(cublas_lt().MatmulPreferenceCreate(&preference));
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    SBTRAIN_CUBLAS_CHECK(
        cublas_lt().MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  const auto alignment = static_cast<uint32_t>(shape.alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment);
  // Split-K may add up in a workspace, where the order is fixed, but not in place, where the order
  // is that of arrival.
  const uint32_t reductions =
      CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions);
  std::vector<cublasLtMatmulHeuristicResult_t> results(kShortCandidates);
  int found = 0;
  const cublasStatus_t status =
      cublas_lt().MatmulAlgoGetHeuristic(blas, made->operation, made->a, made->b, made->c, made->d,
                                         preference, kShortCandidates, results.data(), &found);
  cublas_lt().MatmulPreferenceDestroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
    fail(ExitCode::kInternal, "cuBLASLt has no algorithm for {}", key(shape));
  }
  for (int i = 0; i < found; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS) made->candidates.push_back(results[i].algo);
  }
  require(!made->candidates.empty(), "cuBLASLt has no usable algorithm for {}", key(shape));
  made->algorithm = made->candidates.front();
  if (const auto it = choices_.find(key(shape)); it != choices_.end()) {
    cublasLtMatmulHeuristicResult_t checked{};
    cublasLtMatmulAlgo_t algorithm{};
    made->chosen =
        from_hex(it->second, algorithm) &&
        cublas_lt().MatmulAlgoCheck(blas, made->operation, made->a, made->b, made->c, made->d,
                                    &algorithm, &checked) == CUBLAS_STATUS_SUCCESS &&
        checked.workspaceSize <= workspace_bytes;
    if (made->chosen) made->algorithm = algorithm;
  }
  plan = std::move(made);
  return *plan;
}

void GemmTuner::time_candidates(cublasLtHandle_t blas, cudaStream_t stream, Plan& plan,
                                const Gemm& g, const Tensor& workspace) {
  const auto run = [&](const Gemm& what, const cublasLtMatmulAlgo_t& with) {
    return plan.run(blas, stream, what, workspace, with) == CUBLAS_STATUS_SUCCESS;
  };
  // An f32 sum has 24 bits, a bf16 only the first 8 of them, and a bf16 of it plus something larger
  // has fewer still. So y gets the first suggestion's product, rounded, without what else is added,
  // and then the candidate's product minus that: the next 8 bits. Of an f32 product nothing is
  // left.
  Checksum checksum(stream);
  const cublasLtMatmulAlgo_t* first = nullptr;  // the first suggestion that runs
  Gemm product = g;
  product.c = {};
  const auto bits_of = [&](const cublasLtMatmulAlgo_t& candidate) -> std::optional<uint64_t> {
    product.beta = 0;
    if (!run(product, first ? *first : candidate)) return {};
    product.beta = -1;
    if (!run(product, candidate)) return {};
    return checksum.of(g.y);
  };
  StreamTimer timer(stream);
  uint64_t bits = 0;  // of the first suggestion
  float best = 0;
  int count = 0;
  for (const cublasLtMatmulAlgo_t& candidate : plan.candidates) {
    if (++count > kCandidates && (!plan.chosen || best > kShort)) break;
    const std::optional<uint64_t> these = bits_of(candidate);
    if (!these) continue;
    if (!first) {
      first = &candidate;
      bits = *these;
    }
    if (*these != bits) continue;
    const auto once = [&] { run(g, candidate); };
    float milliseconds = timer.time(kTimedRuns, once);
    if (milliseconds < kShort) {
      const float recorded = timer.time_recorded(kRecordedRuns, once);
      if (recorded > 0) milliseconds = recorded;
    }
    if (plan.chosen && milliseconds >= best) continue;
    best = milliseconds;
    plan.algorithm = candidate;
    plan.chosen = true;
  }
  if (!plan.chosen) return;
  choices_[key(plan.shape)] = to_hex(plan.algorithm);
  changed_ = true;
}

void GemmTuner::run(cublasLtHandle_t blas, cudaStream_t stream, const Gemm& g,
                    const Tensor& workspace, bool search) {
  const DType c = added(g).dtype;
  const bool bf16 = g.a.dtype == DType::kBF16 && g.b.dtype == DType::kBF16;
  const bool fp8 = is_fp8(g.a.dtype) && is_fp8(g.b.dtype) && g.a_inverse_scale && g.b_inverse_scale;
  require((bf16 || fp8) && c == g.y.dtype, "matrix product of {} and {} into {} with {}",
          dtype_name(g.a.dtype), dtype_name(g.b.dtype), dtype_name(g.y.dtype), dtype_name(c));
  if (g.y.numel() == 0) return;
  Plan& p = plan(blas, shape_of(g), workspace.bytes());
  p.set_scales(g);
  if (search && !p.chosen) time_candidates(blas, stream, p, g, workspace);
  SBTRAIN_CUBLAS_CHECK(p.run(blas, stream, g, workspace, p.algorithm));
}

}  // namespace sbtrain::ops::cuda
