// How a layer declares its parameters, and how it sees them in a step.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor.h"

namespace sbtrain {

struct Init {
  enum class Kind : uint8_t { kConstant, kNormal };
  Kind kind = Kind::kConstant;
  double value = 0.0;  // the constant, or the standard deviation
  static Init constant(double value) { return {Kind::kConstant, value}; }
  static Init normal(double std) { return {Kind::kNormal, std}; }
};

// What a parameter is to an optimizer.
enum class ParamRole : uint8_t {
  kLinear,  // the matrix that a layer of a block multiplies by
  kTable,   // embedding, head and learned positions: a row for each token or position
  kOther,   // norms, biases, gates, convolutions and the like
};

// One named parameter tensor. Names are the Llama checkpoint names, relative to their unit (the
// embedding, one block, or the head).
struct TensorSpec {
  std::string name;
  std::vector<int64_t> shape;    // logical: what is counted, checkpointed and exported
  std::vector<int64_t> storage;  // in memory; empty: same as shape. Elements beyond shape stay 0.
  Init init;
  bool decay = false;   // weight decay applies
  float lr_factor = 1;  // of the step's learning rate
  bool fused = false;   // follows the previous tensor without a gap: one matrix
  // Each backward pass of a micro-batch forms the whole gradient, as stored, by one product, norm
  // or loss before anything is added, which overwrites what is there instead of adding to zeros.
  bool one_product = false;
  ParamRole role = ParamRole::kOther;
  // Rows that belong to heads, of queries, keys or values: each head has rows / heads of them, and
  // the heads that share keys and values (grouped-query attention) follow each other.
  int64_t heads = 1;
  int64_t groups = 1;  // of heads

  const std::vector<int64_t>& stored() const { return storage.empty() ? shape : storage; }
};

// Whether products in fp8 take the matrix: that of a block's linear layer, of which tensor cores
// want both sizes as stored to be multiples of 16. Matrices that are one product are taken all or
// not at all.
bool takes_fp8(const TensorSpec& spec);

// What belongs to a matrix that is held in e4m3, or to several that are one product: they have one
// scale (ops/fp8.h).
struct Fp8Scaled {
  Tensor inverse_scale_1;  // f32
  Tensor transposed;       // [cols, rows] of them all; undefined: to be made by who needs it
};

// The tensors of one unit, by name; used for weights and, with the same names, for gradients.
class Weights {
 public:
  // `fresh`: a gradient that holds nothing yet, so that what forms it has to overwrite it.
  void add(std::string name, const Tensor& tensor, bool fresh = false);
  void add(const Weights& others);
  // Says that the tensor of this name, and those that are one product with it, are in fp8.
  void set_fp8(std::string_view first, const Fp8Scaled& scaled);
  // Null where it is not.
  const Fp8Scaled* fp8(std::string_view first) const;
  // Throws ExitCode::kInternal for a name that the unit does not have.
  const Tensor& at(std::string_view name) const;
  bool has(std::string_view name) const;
  bool fresh(std::string_view name) const;
  // `count` fused tensors that follow each other, the first by name, as one matrix.
  Tensor fused(std::string_view first, int count) const;

 private:
  struct Entry {
    std::string name;
    Tensor tensor;
    bool fresh;
    std::optional<Fp8Scaled> fp8 = {};
  };
  const Entry& entry(std::string_view name) const;
  std::vector<Entry> entries_;
};

}  // namespace sbtrain
