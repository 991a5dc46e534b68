// The named tensor registry of a model, which drives initialisation, optimizer, sharding,
// checkpoints, counting and export.
//
// Tensors are grouped in units, which are gathered, released and reduced as a whole: the
// embedding, each block, the head, and what layers share. A unit is one flat array of storage
// elements in which the tensors follow each other; ranks own equal ranges of it. Storage may be
// padded (odd inner widths); whatever leaves memory is logical: unpadded, in row-major order.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "core/stream.h"
#include "core/weights.h"

namespace sbtrain {

struct PlacedTensor {
  TensorSpec spec;     // spec.name is relative to the unit
  std::string name;    // full name, "model.layers.0.self_attn.q_proj.weight"
  int64_t offset = 0;  // storage elements from the start of the unit
  int64_t stored = 0;  // storage elements
  int64_t count = 0;   // logical elements
};

struct ParamUnit {
  std::string prefix;  // "model.layers.0."
  std::vector<PlacedTensor> tensors;
  int64_t size = 0;  // storage elements, a multiple of the registry's alignment
};

// Storage elements [begin, end) of a unit.
struct ElementRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// What of a unit no single product forms the gradient of (TensorSpec::one_product), padding
// included: such gradients are sums that begin with zero.
std::vector<ElementRange> summed_ranges(const ParamUnit& unit);

// A matrix of a unit that products in fp8 take, or several that are one product.
struct Fp8Range : ElementRange {
  std::string first;  // name of the first, relative to the unit
  int64_t rows = 0;   // of all together
  int64_t cols = 0;
};
// In the order of storage. Each begins and ends at a multiple of 64 elements.
std::vector<Fp8Range> fp8_ranges(const ParamUnit& unit);

// A contiguous run of elements in storage and in the logical tensor.
struct ElementRun {
  int64_t storage = 0;  // from the start of the tensor's storage
  int64_t logical = 0;
  int64_t count = 0;
};

class ParamRegistry {
 public:
  // Unit sizes are rounded up to a multiple of `world` * 64 elements.
  explicit ParamRegistry(int world = 1) : alignment_(int64_t{64} * world) {}

  int add_unit(std::string prefix, const std::vector<TensorSpec>& tensors);

  const std::vector<ParamUnit>& units() const { return units_; }
  const ParamUnit& unit(int index) const { return units_.at(index); }
  int64_t count() const;    // logical parameters
  int64_t storage() const;  // storage elements of all units

  // Views of the unit's tensors in `flat`, which holds the whole unit. `fresh`: gradients that hold
  // nothing yet where one product forms them, and zeros elsewhere.
  Weights view(int unit, const Tensor& flat, bool fresh = false) const;

 private:
  int64_t alignment_;
  std::vector<ParamUnit> units_;
};

// Calls `visit` for every run of logical elements in storage [begin, end) of the tensor.
void for_each_run(const PlacedTensor& tensor, int64_t begin, int64_t end,
                  const std::function<void(const ElementRun&)>& visit);

// The logical elements of the tensor that lie in storage [begin, end): a contiguous range.
struct LogicalRange {
  int64_t begin = 0;
  int64_t end = 0;
};
LogicalRange logical_range(const PlacedTensor& tensor, int64_t begin, int64_t end);

// Fills `x_N`, which is storage [begin, begin + N) of the unit, with initial values where it lies.
// They are keyed by (seed, tensor name, global logical element): the same for every sharding and
// backend. Padding is zero.
void initialize(const ParamUnit& unit, int64_t begin, uint64_t seed, Stream& s, const Tensor& x_N);

// What a model's forward and backward pass need of its parameters, one unit at a time.
class ParamAccess {
 public:
  virtual ~ParamAccess() = default;
  virtual void gather(int unit) = 0;         // starts fetching the whole unit
  virtual const Weights& get(int unit) = 0;  // waits for it
  virtual void release(int unit) = 0;        // its buffer may be reused
  // Where the backward pass adds, or overwrites what is fresh (Weights::fresh).
  virtual const Weights& gradients(int unit) = 0;
  virtual void reduce(int unit) = 0;  // gradients are complete: reduce to shards
};

}  // namespace sbtrain
