// A layer that multiplies by a weight matrix, with everything that the product needs.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/stream.h"
#include "core/weights.h"
#include "layers/norm.h"

namespace sbtrain {

// y_TN = alpha * x_TK W^T + b. W [N, K] is one tensor, or several that follow each other in memory
// and are multiplied as one matrix: q, k and v, or gate and up.
struct LinearSpec {
  struct Part {
    std::string weight;             // name, relative to the unit
    int64_t rows = 0;               // outputs
    int64_t stored_rows = 0;        // padded, if that is faster; 0: rows
    std::string bias = {};          // name; empty: none. All parts have one, or none has.
    int64_t heads = 1, groups = 1;  // of the rows, as in TensorSpec
  };
  std::vector<Part> parts;
  int64_t cols = 0;         // K, inputs
  int64_t stored_cols = 0;  // 0: cols
  Init init;
  float alpha = 1.0f;
  ParamRole role = ParamRole::kLinear;  // of the weights
  Init bias_init = Init::constant(0);
  // false: the activation that follows adds the bias. backward() then takes the gradient of the
  // sum, which is what enters the activation.
  bool adds_bias = true;
};

// What a layer keeps of its inputs for backward(), where its products are in fp8: their transpose
// in e4m3, which is all that the gradient of the weights reads of them.
struct Fp8Inputs {
  Buffer x_KT, inverse_scale_1;
  bool kept() const { return x_KT.tensor().defined(); }
};

class Linear {
 public:
  explicit Linear(LinearSpec spec);

  // The weights in their order, then the biases.
  std::vector<TensorSpec> parameters() const;
  void add_parameters(std::vector<TensorSpec>& specs) const;

  int64_t outputs() const;  // N as stored
  Tensor weight(const Weights& w) const { return w.fused(spec_.parts.front().weight, parts()); }
  float alpha() const { return spec_.alpha; }
  bool has_bias() const { return !spec_.parts.front().bias.empty(); }
  Tensor bias(const Weights& w) const { return w.fused(spec_.parts.front().bias, parts()); }

  // y_TN = the product, plus residual_TN if it is given. Where it is in fp8, `keeps` gets what
  // backward() takes in the place of x_TK, and amax_1 (f32), the largest |x|, spares a pass that
  // looks for it.
  struct ForwardOptions {
    Tensor residual_TN{};
    Tensor amax_1{};
    Fp8Inputs* keeps = nullptr;
  };
  void forward(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w,
               const ForwardOptions& options) const;
  void forward(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w,
               Tensor residual_TN = {}) const {
    forward(s, y_TN, x_TK, w, ForwardOptions{.residual_TN = residual_TN});
  }
  // What backward() takes in the place of x_TK where its products are in fp8, else nothing; amax_1
  // as above.
  Fp8Inputs keep_inputs(Stream& s, Tensor x_TK, Tensor amax_1) const;
  // Whether forward() of as many tokens is in fp8.
  bool in_fp8(const Stream& s, int64_t tokens) const;
  // The same without residual and bias, where the first `rows` outputs have another factor than
  // alpha.
  void forward_scaled(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w, int64_t rows,
                      float factor, Tensor amax_1 = {}) const;
  // The same for the few rows of a decode step, of x_BK after a norm that it has still to pass, and
  // with SwiGLU afterwards: one kernel on a GPU (ops::DecodeLinear).
  struct Around {
    InputNorm norm = {};
    bool swiglu = false;
  };
  void decode(Stream& s, Tensor y_BN, Tensor x_BK, const Weights& w, const Around& around) const;
  // Adds the gradients of weight and bias to dw, or overwrites that of a weight that is fresh
  // there; dx_TK = gradient, or += with `accumulate`. To be called once for each backward pass.
  // In fp8, `kept` stands for x_TK, which may then be undefined, and the amaxes (f32) of x and dy
  // spare a pass each.
  struct BackwardOptions {
    bool accumulate = false;
    Tensor x_amax_1{}, dy_amax_1{};
    const Fp8Inputs* kept = nullptr;
  };
  void backward(Stream& s, Tensor dx_TK, const Weights& dw, Tensor dy_TN, Tensor x_TK,
                const Weights& w, const BackwardOptions& options) const;
  void backward(Stream& s, Tensor dx_TK, const Weights& dw, Tensor dy_TN, Tensor x_TK,
                const Weights& w, bool accumulate = false) const {
    backward(s, dx_TK, dw, dy_TN, x_TK, w, BackwardOptions{.accumulate = accumulate});
  }

 private:
  int parts() const { return static_cast<int>(spec_.parts.size()); }
  // Outputs that are a product of their own, with a factor of their own.
  struct Range {
    int64_t first, rows;
    float factor;
  };
  void multiply(Stream& s, Tensor y_TN, Tensor x_TK, const Weights& w,
                const ForwardOptions& options, std::initializer_list<Range> ranges) const;
  void multiply_gradients_in_fp8(Stream& s, Tensor dx_TK, const Weights& dw, Tensor dy_TN,
                                 Tensor x_TK, const Weights& w,
                                 const BackwardOptions& options) const;
  bool fresh(const Weights& dw) const { return dw.fresh(spec_.parts.front().weight); }
  const Fp8Scaled* held_in_fp8(const Weights& w) const { return w.fp8(spec_.parts.front().weight); }
  LinearSpec spec_;
  bool takes_fp8_;  // the matrix, that is (core/weights.h)
};

}  // namespace sbtrain
