// The interface of attention modules.
//
// A module owns everything between the normalised block input and the output projection: its
// parameters, its forward and backward pass, what it saves between them, and its decode step with a
// cache. The block knows no module by name: a module is one file that registers itself under the
// name that configurations use.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attention/attention_config.h"
#include "attention/reference.h"
#include "core/sequences.h"
#include "core/stream.h"
#include "core/weights.h"
#include "layers/linear.h"

namespace sbtrain {

// What one forward pass leaves for the backward pass; each module derives its own.
class AttentionSaved {
 public:
  virtual ~AttentionSaved() = default;
  // f32, the largest |x_TD| of the forward pass, where reads_fp8() and the block has found it: it
  // spares the products with x a pass each.
  Buffer x_amax_1;
};

// Keys, values and whatever else decoding needs, for B independent sequences.
class AttentionCache {
 public:
  virtual ~AttentionCache() = default;
};
class KeptKeys;  // attention/kept_keys.h

// The tokens of one decode step: one for each of the first B sequences of a cache, which may be
// fewer than the cache has.
struct DecodeStep {
  Tensor positions_B;  // i32, of the new token, from 0
  Tensor lengths_B;    // i32, positions + 1
  // i32, the most tokens that each sequence may come to have, by which some rotary positions are
  // scaled (Sequences::reach); undefined: the capacity of the cache.
  Tensor reach_B{};
  InputNorm norm;  // that x_BD has still to pass, for modules with norms_input()
};

// What one head attends to, over the T tokens of one document (attention/map.h):
//   o_j = sum_i A_ij v_i, plus remainder_j times what the option `remainder` names
struct AttentionMap {
  int64_t tokens = 0;              // T; 0: the module has no map
  std::vector<float> weights_TT;   // A_ij at [j, i]; 0 for keys that token j does not see
  std::vector<float> remainder_T;  // stick-breaking: what token j gives to no key; else empty
};

// Pairs of a query and a key that it may look at: those that a forward pass has read, and all that
// there are.
struct KeysRead {
  int64_t read = 0;
  int64_t visible = 0;
  // Queries that have read a key more than n eighths of the longest document before them.
  std::array<int64_t, 8> beyond{};
  KeysRead& operator+=(const KeysRead& more) {
    read += more.read;
    visible += more.visible;
    for (size_t n = 0; n < beyond.size(); ++n) beyond[n] += more.beyond[n];
    return *this;
  }
};

class Attention {
 public:
  virtual ~Attention() = default;

  // Parameters, names relative to the block ("self_attn.q_proj.weight").
  virtual std::vector<TensorSpec> parameters() const = 0;
  // Parameters that layers share, named in the same way: the model has one tensor for each name,
  // and every layer that lists the name finds it among its weights.
  virtual std::vector<TensorSpec> shared_parameters() const { return {}; }

  // The number of columns of mix, which the block's output projection takes.
  virtual int64_t mix_width(int64_t model_width) const { return model_width; }

  // Allocates what forward() will fill, for `tokens` tokens.
  virtual std::unique_ptr<AttentionSaved> allocate(Memory& memory, int64_t tokens) const = 0;

  // mix_TD = module(x_TD).
  virtual void forward(Stream& s, Tensor mix_TD, Tensor x_TD, const Weights& w,
                       AttentionSaved& saved, const Sequences& sequences) const = 0;

  // Whether the products with x_TD of as many tokens are in fp8.
  virtual bool reads_fp8(const Stream& /*s*/, int64_t /*tokens*/) const { return false; }

  // Starts what backward() needs of other ranks, so that it is under way while the block finds
  // dmix_TD. Where ranks share sequences, it comes before each backward().
  virtual void begin_backward(Stream& /*s*/, AttentionSaved& /*saved*/,
                              const Sequences& /*sequences*/) const {}

  // dx_TD = gradient; gradients of the weights are added to `dw`. mix_TD is the output of
  // forward().
  virtual void backward(Stream& s, Tensor dx_TD, const Weights& dw, Tensor dmix_TD, Tensor mix_TD,
                        Tensor x_TD, const Weights& w, AttentionSaved& saved,
                        const Sequences& sequences) const = 0;

  virtual std::unique_ptr<AttentionCache> allocate_cache(Memory& memory, int64_t sequences,
                                                         int64_t capacity) const = 0;

  // A module whose keys have gates has caches that drop those with small ones, of which this is the
  // one of `layer`; prefill() and decode() take it as well. Null: a later query may want any key.
  virtual std::unique_ptr<AttentionCache> dropping_cache(KeptKeys& /*keys*/,
                                                         int64_t /*layer*/) const {
    return nullptr;
  }
  virtual bool drops_keys() const { return false; }  // whether it has one

  // Copies keys and values of sequence `b`'s prompt, whose tokens are exactly those of the
  // forward pass that filled `saved`, to the start of its cache.
  virtual void prefill(Stream& s, AttentionCache& cache, int64_t b,
                       const AttentionSaved& saved) const = 0;

  // mix_BD = module output of one new token for each sequence; its keys and values are appended.
  virtual void decode(Stream& s, Tensor mix_BD, Tensor x_BD, const Weights& w,
                      AttentionCache& cache, const DecodeStep& step) const = 0;

  // Whether decode() can apply an RMSNorm to x_BD itself, together with its projection.
  virtual bool norms_input() const { return false; }

  // What head `head` attends to, computed from what the forward pass of one document saved. A
  // module that does not weigh keys has no map.
  virtual AttentionMap map(Stream& /*s*/, const Weights& /*w*/, const AttentionSaved& /*saved*/,
                           const Sequences& /*sequences*/, int64_t /*head*/) const {
    return {};
  }

  // What each head has read of the keys in a forward pass that filled `saved`; the backward pass
  // reads the same again. A module that never skips a key counts none, and lists no head.
  virtual std::vector<KeysRead> keys_read_by_head(Stream& /*s*/, const AttentionSaved& /*saved*/,
                                                  const Sequences& /*sequences*/) const {
    return {};
  }
  // The same over all heads.
  KeysRead keys_read(Stream& s, const AttentionSaved& saved, const Sequences& sequences) const {
    KeysRead all;
    for (const KeysRead& head : keys_read_by_head(s, saved, sequences)) all += head;
    return all;
  }

  // The formula: what forward() computes for one document, in double precision on the host. Tests
  // compare every implementation, and its gradients, with it. `max_seqlen` is that of the pack.
  virtual HostMatrix reference(const HostMatrix& x_TD, const HostWeights& w,
                               int64_t max_seqlen) const = 0;

  // What backward() adds to the gradient of the output besides: that of an auxiliary loss of the
  // module, a sum over these tokens of any documents, in double precision on the host.
  virtual double auxiliary_loss(const HostMatrix& /*x_TD*/, const HostWeights& /*w*/) const {
    return 0;
  }

  // The number of keys that a token sees when its document offers `keys`.
  virtual double seen_keys(double keys) const { return keys; }

  // Floating-point operations of the forward pass between the projections, for one token that
  // sees `keys` keys (2 per multiply-add). The backward pass counts as twice that.
  virtual double flops_per_token(double keys) const = 0;
};

// Builds the module that `config.type` names (attention/registry.h). Throws ExitCode::kConfig for
// an unknown name, listing the known ones, and for options that do not go together.
std::unique_ptr<Attention> make_attention(const AttentionConfig& config,
                                          const AttentionShape& model);

}  // namespace sbtrain
