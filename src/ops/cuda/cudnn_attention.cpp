// The only file that uses cuDNN, through the graph API of its frontend, which is headers only. The
// build defines SBTRAIN_HAS_CUDNN if it has found them.
//
// A pack of documents is a batch of ragged tensors: for each document its length and, for each
// tensor, the element at which it begins. A plan is built once for each shape. The number of
// documents is part of the shape, so batches are filled up with empty documents (cudnn_batch).
#include "ops/cuda/cudnn_attention.h"

#include "ops/libraries.h"

#ifndef SBTRAIN_HAS_CUDNN

namespace sbtrain::ops::cuda {

std::unique_ptr<CudnnAttention> CudnnAttention::open(bool, std::string* why) {
  *why = "this build has no cuDNN: its frontend's headers or cudnn.h were not found";
  return nullptr;
}

}  // namespace sbtrain::ops::cuda

namespace sbtrain::ops {

FoundLibrary find_cudnn() {
  return {.name = "cuDNN",
          .problem =
              "this build was made without it: its frontend's headers or cudnn.h were not "
              "found; softmax attention runs on sbtrain's own kernels"};
}

}  // namespace sbtrain::ops

#else

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>
#include <fmt/format.h>

#include <array>
#include <compare>
#include <cstdlib>
#include <map>
#include <unordered_map>

#include "core/error.h"
#include "core/shared_library.h"
#include "kernels/attention/ragged.h"
#include "ops/choose.h"
#include "ops/cuda/context.h"

// Where the frontend looks for cuDNN's functions.
namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace sbtrain::ops::cuda {
namespace {

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;
using kernels::SoftmaxProblem;
using TensorPointer = std::shared_ptr<Tensor_attributes>;

// The ids of the ragged tensors; kOffsets plus an id is that of its offsets, then come the lengths.
enum Id : int64_t { kQ, kK, kV, kO, kStatistics, kDout, kDq, kDk, kDv, kRagged };
constexpr int64_t kForwardTensors = kStatistics + 1;
constexpr int64_t kOffsets = 100;
constexpr int64_t kLengthsQ = 200;
constexpr int64_t kLengthsKv = 201;

// Everything that a plan depends on.
struct Shape {
  int64_t batch, tokens, heads, head_dim, max_seqlen, window;
  float scale;
  bool is_backward, deterministic;
  std::array<int64_t, kRagged> stride;  // elements between two tokens

  static Shape of(const SoftmaxProblem& p, bool is_backward, bool deterministic) {
    Shape s{.batch = ops::cudnn_batch(p.sequences),
            .tokens = p.tokens,
            .heads = p.heads,
            .head_dim = p.head_dim,
            .max_seqlen = std::min(p.max_seqlen, p.tokens),
            .window = p.window < p.max_seqlen ? p.window : 0,
            .scale = p.scale,
            .is_backward = is_backward,
            .deterministic = is_backward && deterministic,
            .stride = {p.q.stride, p.k.stride, p.v.stride, p.o.stride, p.heads}};
    if (is_backward) {
      s.stride[kDout] = p.dout.stride;
      s.stride[kDq] = p.dq.stride;
      s.stride[kDk] = p.dk.stride;
      s.stride[kDv] = p.dv.stride;
    }
    return s;
  }
  int64_t tensors() const { return is_backward ? int64_t{kRagged} : kForwardTensors; }
  auto operator<=>(const Shape&) const = default;  // NOLINT: clang-tidy takes it for a null pointer
};

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph{};
  size_t workspace = 0;
  std::string why{};  // why there is no plan
};

// Builds the graph of one shape.
class Builder {
 public:
  Builder(const Shape& shape, int sm_version)
      : shape_(shape), graph_(std::make_shared<fe::graph::Graph>()) {
    graph_->set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT)
        .set_sm_version(sm_version);
    lengths_q_ = index(kLengthsQ, fe::DataType_t::INT32, shape_.batch);
    lengths_kv_ = index(kLengthsKv, fe::DataType_t::INT32, shape_.batch);
  }

  Plan build(cudnnHandle_t handle) {
    shape_.is_backward ? add_backward() : add_forward();
    fe::error_t error = graph_->build(handle, {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK});
    if (error.is_bad()) return {.why = "cuDNN: " + error.get_message()};
    const int64_t bytes = graph_->get_workspace_size();
    if (bytes < 0) return {.why = "cuDNN: no workspace size"};
    return {.graph = graph_, .workspace = static_cast<size_t>(bytes)};
  }

 private:
  void add_forward() {
    auto options = fe::graph::SDPA_attributes()
                       .set_name("attention")
                       .set_generate_stats(true)
                       .set_attn_scale(shape_.scale);
    mask(options);
    const auto [o, statistics] = graph_->sdpa(input(kQ), input(kK), input(kV), options);
    lay_out(*o, kO).set_output(true);
    lay_out(*statistics, kStatistics).set_output(true);
  }

  void add_backward() {
    auto options = fe::graph::SDPA_backward_attributes()
                       .set_name("attention_backward")
                       .set_deterministic_algorithm(shape_.deterministic)
                       .set_max_total_seq_len_q(shape_.tokens)
                       .set_max_total_seq_len_kv(shape_.tokens)
                       .set_attn_scale(shape_.scale);
    mask(options);
    const auto [dq, dk, dv] = graph_->sdpa_backward(input(kQ), input(kK), input(kV), input(kO),
                                                    input(kDout), input(kStatistics), options);
    lay_out(*dq, kDq).set_output(true);
    lay_out(*dk, kDk).set_output(true);
    lay_out(*dv, kDv).set_output(true);
  }

  // Causal, within documents, within the window: keys with key > query - window.
  template <typename Options>
  void mask(Options& options) {
    options.set_padding_mask(true)
        .set_seq_len_q(lengths_q_)
        .set_seq_len_kv(lengths_kv_)
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0);
    if (shape_.window > 0) {
      options.set_diagonal_band_left_bound(static_cast<int>(shape_.window));
    }
  }

  TensorPointer index(int64_t id, fe::DataType_t type, int64_t count) {
    return graph_->tensor(Tensor_attributes()
                              .set_uid(id)
                              .set_dim({count, 1, 1, 1})
                              .set_stride({1, 1, 1, 1})
                              .set_data_type(type));
  }
  Tensor_attributes& lay_out(Tensor_attributes& tensor, Id id) {
    const int64_t rows = shape_.max_seqlen;
    const int64_t stride = shape_.stride[id];
    // One number for each token and head, or head_dim of them.
    const int64_t cols = id == kStatistics ? 1 : shape_.head_dim;
    return tensor.set_uid(id)
        .set_dim({shape_.batch, shape_.heads, rows, cols})
        .set_stride({rows * stride, cols, stride, 1})
        .set_data_type(id == kStatistics ? fe::DataType_t::FLOAT : fe::DataType_t::BFLOAT16)
        .set_ragged_offset(index(kOffsets + id, fe::DataType_t::INT64, shape_.batch + 1));
  }
  TensorPointer input(Id id) {
    Tensor_attributes tensor;
    return graph_->tensor(lay_out(tensor, id));
  }

  Shape shape_;
  std::shared_ptr<fe::graph::Graph> graph_;
  TensorPointer lengths_q_, lengths_kv_;
};

class Loaded final : public CudnnAttention {
 public:
  Loaded(bool deterministic, cudnnHandle_t handle, int sm_version)
      : deterministic_(deterministic), handle_(handle), sm_version_(sm_version) {}
  ~Loaded() override {
    plans_.clear();
    fe::detail::destroy_handle(handle_);
  }

  size_t bytes(const SoftmaxProblem& p, bool is_backward) override {
    const Shape shape = Shape::of(p, is_backward, deterministic_);
    const Plan& plan = plan_of(shape);
    return plan.graph ? own_bytes(shape) + plan.workspace : 0;
  }

  std::string run(cudaStream_t stream, const SoftmaxProblem& p, const Tensor& workspace,
                  bool is_backward) override {
    if (p.tokens == 0) return "";
    if (p.sequences > ops::kMaxCudnnDocuments) {
      return fmt::format("{} documents in one pack, more than {}", p.sequences,
                         ops::kMaxCudnnDocuments);
    }
    const Shape shape = Shape::of(p, is_backward, deterministic_);
    const Plan& plan = plan_of(shape);
    if (!plan.graph) return plan.why;
    if (own_bytes(shape) + plan.workspace > workspace.bytes()) {
      constexpr double kMiB = 1 << 20;
      return fmt::format(
          "cuDNN wants {:.1f} MiB of scratch for {} documents of up to {} tokens, "
          "{:.1f} are planned",
          (own_bytes(shape) + plan.workspace) / kMiB, p.sequences, p.max_seqlen,
          workspace.bytes() / kMiB);
    }

    auto* const data = static_cast<std::byte*>(workspace.data);
    auto* const statistics = reinterpret_cast<float*>(data);
    std::byte* const indices = data + ops::cudnn_statistics_bytes(p.tokens, p.heads);
    auto* const offsets = reinterpret_cast<int64_t*>(indices);
    auto* const lengths = reinterpret_cast<int32_t*>(offsets + shape.tensors() * (shape.batch + 1));
    kernels::RaggedBatch ragged{.batch = static_cast<int>(shape.batch),
                                .sequences = p.sequences,
                                .cu_seqlens = p.cu_seqlens,
                                .tensors = static_cast<int>(shape.tensors())};
    std::copy_n(shape.stride.begin(), shape.tensors(), ragged.stride);
    kernels::ragged_batch(stream, ragged, offsets, lengths);
    // cuDNN has the statistics of a pack in the order [T, H]; ours is [H, T].
    if (is_backward) {
      kernels::transpose_f32(stream, statistics, p.lse, p.heads, p.tokens);
    }

    std::unordered_map<int64_t, void*> pointers = {{kQ, p.q.data},
                                                   {kK, p.k.data},
                                                   {kV, p.v.data},
                                                   {kO, p.o.data},
                                                   {kStatistics, statistics},
                                                   {kLengthsQ, lengths},
                                                   {kLengthsKv, lengths}};
    if (is_backward) {
      pointers.insert({{kDout, p.dout.data}, {kDq, p.dq.data}, {kDk, p.dk.data}, {kDv, p.dv.data}});
    }
    for (int64_t i = 0; i < shape.tensors(); ++i) {
      pointers[kOffsets + i] = offsets + i * (shape.batch + 1);
    }
    if (fe::detail::set_stream(handle_, stream) != CUDNN_STATUS_SUCCESS) {
      fail(ExitCode::kInternal, "cuDNN: cannot set the stream");
    }
    fe::error_t error = plan.graph->execute(handle_, pointers, data + own_bytes(shape));
    if (error.is_bad()) fail(ExitCode::kInternal, "cuDNN: {}", error.get_message());
    if (!is_backward) {
      kernels::transpose_f32(stream, p.lse, statistics, p.tokens, p.heads);
    }
    return "";
  }

  std::string version() const override { return dotted_version(fe::detail::get_backend_version()); }

 private:
  // The bytes of statistics and indices, which lie before the workspace of cuDNN itself.
  static size_t own_bytes(const Shape& shape) {
    return ops::cudnn_statistics_bytes(shape.tokens, shape.heads) +
           ops::cudnn_index_bytes(shape.batch);
  }

  const Plan& plan_of(const Shape& shape) {
    const auto [at, is_new] = plans_.try_emplace(shape);
    if (is_new) {
      try {
        at->second = Builder(shape, sm_version_).build(handle_);
      } catch (const std::exception& e) {
        at->second = {.why = std::string("cuDNN: ") + e.what()};
      }
    }
    return at->second;
  }

  bool deterministic_;
  cudnnHandle_t handle_;
  int sm_version_;
  std::map<Shape, Plan> plans_;
};

// The running system's cuDNN, or the one that the build found.
SharedLibrary load_library() {
  return {"cuDNN",
          {"libcudnn.so.9",
#ifdef SBTRAIN_CUDNN_LIBRARY
           SBTRAIN_CUDNN_LIBRARY
#endif
          },
          "install cuDNN 9.6 or later (pip install 'sbtrain[cuda]', or the package libcudnn9)"};
}

// Before 9.6 the backward pass takes scratch for the padded batch; 9.10.0 and 9.10.1 compute wrong
// results. Empty for other versions.
std::string why_not_used(size_t version) {
  if (version >= 90600 && version != 91000 && version != 91001) return "";
  return fmt::format("cuDNN {} is not used; 9.6 or later is needed, except 9.10.0 and 9.10.1",
                     dotted_version(version));
}

}  // namespace

std::unique_ptr<CudnnAttention> CudnnAttention::open(bool deterministic, std::string* why) {
  why->clear();
  try {
    if (!fe::cudnn_dlhandle) fe::cudnn_dlhandle = load_library().handle();
    const size_t version = fe::detail::get_backend_version();
    *why = why_not_used(version);
    if (!why->empty()) return nullptr;
    // From 9.25 on the deterministic backward pass can do without dS in scratch. The frontend
    // reads that from this environment variable.
    if (version >= 92500) setenv("CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT", "0", 0);
    int device = 0, major = 0, minor = 0;
    SBTRAIN_CUDA_CHECK(cudaGetDevice(&device));
    SBTRAIN_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    SBTRAIN_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    cudnnHandle_t handle = nullptr;
    const cudnnStatus_t status = fe::detail::create_handle(&handle);
    if (status != CUDNN_STATUS_SUCCESS) {
      *why = fmt::format("cuDNN: {}", fe::detail::get_error_string(status));
      return nullptr;
    }
    return std::make_unique<Loaded>(deterministic, handle, major * 10 + minor);
  } catch (const std::exception& e) {
    *why = e.what();
    return nullptr;
  }
}

}  // namespace sbtrain::ops::cuda

namespace sbtrain::ops {

FoundLibrary find_cudnn() {
  return look_for("cuDNN", [](FoundLibrary& found) {
    const SharedLibrary library = cuda::load_library();
    found.path = library.path();
    decltype(&::cudnnGetVersion) get = nullptr;
    library.find(get, "cudnnGetVersion");
    const size_t version = get();
    const std::string why = cuda::why_not_used(version);
    if (!why.empty()) fail(ExitCode::kConfig, "{}", why);
    found.version = dotted_version(version);
  });
}

}  // namespace sbtrain::ops

#endif
