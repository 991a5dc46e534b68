// What attention does where ranks share the tokens of a micro-batch (train.context_parallel,
// core/context_share.h): a rank computes the attention within each of its chunks, and then goes
// through the chunks before it, whose keys and values travel around a ring of the ranks beside
// that.
//
// Each rank makes the same transfers in every pass of a layer, whatever its documents, since all
// must take part. The modules that support it say so in their registration (attention/registry.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/context_share.h"
#include "core/memory.h"
#include "core/sequences.h"
#include "core/stream.h"
#include "ops/far_keys.h"

namespace sbtrain {

// The tokens that an op takes whose keys are its own: a chunk of this rank, or all tokens where
// ranks share nothing.
struct OwnTokens {
  int64_t chunk = 0, chunks = 1;
  const Sequences& sequences;
  // Their rows of x_T; x_T itself if it is undefined.
  Tensor rows(const Tensor& x_T) const;
  // Their part of [H, T] numbers, without gaps: chunk after chunk, [H, T / chunks] of each.
  Tensor per_head(const Tensor& x_HT) const;
};
std::vector<OwnTokens> own_tokens(const Sequences& sequences);

// The visits of this rank's chunks to all chunks before them, one chunk of queries after the other.
// The constructor starts the first transfer, so that what the stream is given before the first
// next() runs beside it. The sums of gradients take memory from the first next() on.
//
// Consecutive ranks hold the keys of one rank at a time, in the order in which they come. Ranks of
// a folded line have no common order; each keeps the keys of all, and goes on as they come.
class KeyRing {
 public:
  enum class Pass : uint8_t {
    kForward,   // of each chunk of queries, the nearest keys first
    kBackward,  // the farthest first, with the gradients of the keys
  };
  // k and v, [T, G*d], of this rank, and where keys have gates theirs, f32 [T, H], which travel
  // with them.
  KeyRing(Stream& s, const ContextShare& share, const Tensor& k, const Tensor& v, Pass pass,
          const Tensor& gate_TH = {});

  // Goes on to the next visit; false after the last.
  bool next();

  // ---- The present visit.
  // Of all visits of this rank in the order of the forward pass, 0 <= index < visits(share).
  int64_t index() const { return visits_[visit_].index; }
  static int64_t visits(const ContextShare& share);  // at most, on any rank
  // The last one of a chunk in that order in which it reads a key, if there is one.
  static std::optional<int64_t> last_visit(const ContextShare& share, int64_t chunk);
  // Whether the keys are the nearest ones before the chunk of queries.
  bool nearest() const { return place() == queries().place - 1; }
  OwnTokens own() const;                   // the queries
  Tensor k() const { return key(kKeys); }  // [T / chunks, G*d]
  Tensor v() const { return key(kValues); }
  Tensor gate() const { return key(kGates); }  // [T / chunks, H]; undefined without gates
  // Their gradients, f32, to be added to: sums over the ranks, in one order of these.
  Tensor dk() const { return gradient(kKeys); }
  Tensor dv() const { return gradient(kValues); }
  Tensor dgate() const { return gradient(kGates); }
  ops::FarKeys keys() const {
    return {.queries = queries().continued, .keys = share_.keys_of(queries(), place())};
  }
  // How many tokens before the first one of the queries the first one of the keys lies.
  int64_t distance() const { return (queries().place - place()) * share_.chunk_tokens(); }

  // ---- After the last visit of the backward pass, whose gradients then are on their way home:
  // those that the chunks after them have given to this rank's keys, f32 [T, G*d] and [T, H].
  struct Home {
    Tensor dk, dv, dgate;
  };
  Home home();

 private:
  // What travels of a rank, one after the other in one buffer: one transfer brings all.
  enum Part : uint8_t { kKeys, kValues, kGates };
  struct Visit {
    size_t chunk;  // of queries
    int place;     // of keys
    int64_t index;
  };
  bool keeps() const { return share_.layout == ContextLayout::kFolded; }
  int place() const { return visits_[visit_].place; }
  const ContextChunk& queries() const { return share_.chunks[visits_[visit_].chunk]; }
  int hop_of(int rank) const;
  void start(int hop);
  void advance();
  void pass_on_gradients();
  void send_home();
  // [T, ..] of a rank whose numbers, of type `dtype`, begin at element `begin`.
  Tensor part(const Tensor& numbers, int64_t begin, Part which, DType dtype) const;
  Tensor chunk_rows(const Tensor& x_T) const;
  Tensor key(Part which) const;
  Tensor gradient(Part which) const;
  Buffer key_numbers() const;
  Buffer gradient_sums(int64_t ranks) const;
  // Those of each rank begin at a multiple of 16 bytes.
  int64_t gradients_of_rank() const { return (share_.tokens * (2 * width_ + heads_) + 3) / 4 * 4; }

  Stream& s_;
  const ContextShare& share_;
  const Pass pass_;
  const DType dtype_;    // of keys and values
  const int64_t width_;  // of keys
  const int64_t heads_;  // with gates, else 0
  const int step_;       // by which keys move
  std::vector<Visit> visits_;
  size_t visit_ = 0;
  bool begun_ = false;
  int hop_ = 0;  // transfers that have come
  // Of the rank that comes with each hop.
  std::vector<Buffer> keys_;
  std::vector<Event> arrive_;
  // Of the present rank's keys, or of those of all ranks, one after the other.
  Buffer gradients_;
  Buffer at_home_;
  Event comes_home_;
};

// The visits of a pass, or null where this rank has all tokens.
std::unique_ptr<KeyRing> key_ring(Stream& s, const Sequences& sequences, const Tensor& k,
                                  const Tensor& v, KeyRing::Pass pass, const Tensor& gate_TH = {});

}  // namespace sbtrain
