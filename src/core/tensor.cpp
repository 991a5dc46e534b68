#include "core/tensor.h"

#include "core/error.h"

namespace sbtrain {

size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 2;
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kU8:
    case DType::kE4M3:
    case DType::kE5M2:
      return 1;
    case DType::kF32:
    case DType::kI32:
      break;
  }
  return 4;
}

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kI32:
      return "i32";
    case DType::kF64:
      return "f64";
    case DType::kI64:
      return "i64";
    case DType::kU8:
      return "u8";
    case DType::kE4M3:
      return "e4m3";
    case DType::kE5M2:
      return "e5m2";
  }
  return "?";
}

Tensor::Tensor(void* data, DType dtype, std::initializer_list<int64_t> shape)
    : Tensor(data, dtype, std::span<const int64_t>(shape.begin(), shape.size())) {}

Tensor::Tensor(void* data, DType dtype, std::span<const int64_t> dims)
    : data(data), dtype(dtype), rank(static_cast<int>(dims.size())) {
  require(!dims.empty() && dims.size() <= 4, "tensor of {} dimensions; 1 to 4 are supported",
          dims.size());
  for (size_t i = 0; i < dims.size(); ++i) shape[i] = dims[i];
  row_stride = cols();
}

int64_t Tensor::cols() const {
  int64_t n = 1;
  for (int i = 1; i < rank; ++i) n *= shape[i];
  return n;
}

int64_t Tensor::numel() const {
  return rank == 0 ? 0 : shape[0] * cols();
}

Tensor Tensor::row_range(int64_t begin, int64_t count) const {
  if (begin < 0 || count < 0 || begin + count > shape[0]) {
    fail(ExitCode::kInternal, "rows [{}, {}) are outside {}", begin, begin + count, describe());
  }
  Tensor t = *this;
  t.shape[0] = count;
  if (data) t.data = static_cast<std::byte*>(data) + begin * row_stride * dtype_size(dtype);
  return t;
}

Tensor Tensor::col_range(int64_t begin, int64_t count) const {
  if (rank != 2 || begin < 0 || count < 0 || begin + count > shape[1]) {
    fail(ExitCode::kInternal, "columns [{}, {}) are outside {}", begin, begin + count, describe());
  }
  Tensor t = *this;
  t.shape[1] = count;
  if (data) t.data = static_cast<std::byte*>(data) + begin * dtype_size(dtype);
  return t;
}

Tensor Tensor::reshaped(std::initializer_list<int64_t> new_shape) const {
  if (!contiguous()) fail(ExitCode::kInternal, "cannot reshape the strided view {}", describe());
  Tensor t(data, dtype, new_shape);
  if (t.numel() != numel()) {
    fail(ExitCode::kInternal, "cannot reshape {} to {}", describe(), t.describe());
  }
  return t;
}

namespace {
void* typed(const Tensor& t, DType dtype) {
  if (t.dtype != dtype) {
    fail(ExitCode::kInternal, "expected a {} tensor, got {}", dtype_name(dtype), t.describe());
  }
  return t.data;
}
}  // namespace

float* Tensor::f32() const {
  return static_cast<float*>(typed(*this, DType::kF32));
}
int32_t* Tensor::i32() const {
  return static_cast<int32_t*>(typed(*this, DType::kI32));
}
uint16_t* Tensor::bf16() const {
  return static_cast<uint16_t*>(typed(*this, DType::kBF16));
}
uint8_t* Tensor::fp8() const {
  return static_cast<uint8_t*>(typed(*this, is_fp8(dtype) ? dtype : DType::kE4M3));
}
double* Tensor::f64() const {
  return static_cast<double*>(typed(*this, DType::kF64));
}

std::string Tensor::describe() const {
  std::string dims;
  for (int i = 0; i < rank; ++i) dims += fmt::format("{}{}", i ? ", " : "", shape[i]);
  return fmt::format("{}[{}]", dtype_name(dtype), dims);
}

}  // namespace sbtrain
