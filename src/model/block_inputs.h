// The inputs of blocks between their forward and their backward pass: on the device, or in memory
// of the host (train.offload: activations).
//
// There they travel on a stream of their own, [T, D] of one block after the other. The input of
// block l leaves while block l computes, and has until the end of block l + 1: only then another
// block writes where it was. It comes back while block l + 1 runs backward, into one of two places.
// That of the last block stays, since the backward pass begins with it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/event.h"
#include "core/memory.h"
#include "core/pinned_memory.h"
#include "core/stream.h"

namespace sbtrain {

// The memory of the host for the inputs of all blocks but the last, page-locked, and the stream of
// the copies. All micro-batches use the same.
class ActivationOffload {
 public:
  // For the blocks of a model of that width, and T tokens in a micro-batch. Throws
  // ExitCode::kOutOfMemory if the host has less memory free than it needs.
  ActivationOffload(Stream& compute, int64_t layers, int64_t tokens, int64_t width);

  // The bytes of the host's memory that this takes, with activations of that type.
  static size_t bytes_of(int64_t layers, int64_t tokens, int64_t width, DType dtype);
  size_t bytes() const { return memory_.bytes(); }

  Stream& copies() { return copies_; }
  // Both are work of copies().
  void put(int64_t layer, const Tensor& x_TD);
  void get(int64_t layer, const Tensor& x_TD);

 private:
  size_t offset_of(int64_t layer, const Tensor& x_TD) const;

  const PinnedMemory memory_;  // outlives the stream, which uses it
  Stream copies_;
};

// Of one forward and backward pass. Layers count up in the forward pass and down in the backward
// pass, and each call below is made once for each of them.
class BlockInputs {
 public:
  // `offload`, if it is not null, must outlive this.
  BlockInputs(Stream& compute, int64_t layers, ActivationOffload* offload);

  // Before the block: its input, which the stream's work until now has made.
  Tensor begin_forward(int64_t layer, Buffer x_TD);
  // The stream has been given the block, which only reads its input.
  void end_forward(int64_t layer);
  // Before the block: its input, which is there when the stream comes to what it is given next.
  Tensor begin_backward(int64_t layer);
  // The stream has been given the block; its input is needed no more.
  void end_backward(int64_t layer);

 private:
  bool travels(int64_t layer) const { return offload_ != nullptr && layer + 1 < layers_; }
  void send(int64_t layer);
  void fetch(int64_t layer);
  // The stream that computes waits for all copies so far.
  void wait_for_copies(Event& event);

  Stream& compute_;
  const int64_t layers_;
  ActivationOffload* const offload_;
  std::vector<Buffer> inputs_TD_;
  Event ready_;                // what a copy reads or writes
  std::array<Event, 2> sent_;  // by layer, modulo 2
  Event fetched_;
  int64_t tokens_ = 0, width_ = 0;
};

}  // namespace sbtrain
