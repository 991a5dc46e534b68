// What an attention module is made from: its name and options, and the numbers of its model.
#pragma once

#include <cstdint>
#include <string>

#include "core/module_options.h"

namespace sbtrain {

struct AttentionConfig {
  std::string type = "stickbreaking";  // the module's name (attention/registry.h)
  ModuleOptions options{};             // the module's own
  bool output_bias = false;            // of the projection that follows, if there is one
  bool operator==(const AttentionConfig&) const = default;
};

// What a module knows of the model around it.
struct AttentionShape {
  int64_t width = 128;   // D
  int64_t heads = 4;     // H
  int64_t kv_heads = 0;  // of keys and values, each for heads / kv_heads queries; 0: heads
  int64_t head_dim = 0;  // channels of a head; 0: width / heads
  double norm_eps = 1e-5;
  double init_std = 0.02;  // of matrices; projections into the residual: / sqrt(2 layers)
  int64_t head_width() const { return head_dim > 0 ? head_dim : width / heads; }
  int64_t key_heads() const { return kv_heads > 0 ? kv_heads : heads; }
  int64_t query_width() const { return heads * head_width(); }      // of all queries together
  int64_t key_width() const { return key_heads() * head_width(); }  // of all keys, or all values
  bool operator==(const AttentionShape&) const = default;
};

}  // namespace sbtrain
