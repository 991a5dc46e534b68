#include "model/block_inputs.h"

#include <utility>

#include "core/error.h"
#include "core/host_memory.h"
#include "core/log.h"
#include "core/memory_check.h"
#include "layers/activations.h"
#include "ops/pinned_copy.h"
#include "ops/stream_control.h"

namespace sbtrain {
namespace {

constexpr std::string_view kWhat =
    "train.offload, which keeps the inputs of blocks in the host's memory,";

// The same number of bytes, once the host has them.
size_t checked(Backend backend, size_t bytes) {
  if (backend == Backend::kPlan) return bytes;
  MemoryReport report;
  report.persistent[static_cast<int>(MemoryClass::kActivations)] = bytes;
  require_memory(Backend::kCpu, report, kWhat,
                 "Leave more of the host's memory free, lower train.micro_batch or "
                 "train.sequence_length, or set train.offload: none.");
  return bytes;
}

// Time for which the stream stands idle; its name is that of a part of `bench train`.
void await_copy(Stream& s, const Event& event) {
  ops::timed(s, "await_offload", [&] { s.wait(event); });
}

}  // namespace

// ---- ActivationOffload ------------------------------------------------------------------------

ActivationOffload::ActivationOffload(Stream& compute, int64_t layers, int64_t tokens, int64_t width)
    : memory_(compute.backend(),
              checked(compute.backend(),
                      bytes_of(layers, tokens, width, compute.memory().compute_dtype())),
              kWhat),
      copies_(compute.memory(), "offload") {
  if (memory_.refused().empty()) return;
  log_warning(
      "the system refused to lock {:.2f} GiB of the host's memory ({}): training waits while the "
      "inputs of blocks are copied there and back (train.offload). Raise the limit of locked "
      "memory (ulimit -l)",
      gibibytes(memory_.bytes()), memory_.refused());
}

size_t ActivationOffload::bytes_of(int64_t layers, int64_t tokens, int64_t width, DType dtype) {
  return static_cast<size_t>(layers - 1) * static_cast<size_t>(tokens) *
         static_cast<size_t>(width) * dtype_size(dtype);
}

size_t ActivationOffload::offset_of(int64_t layer, const Tensor& x_TD) const {
  const size_t offset = static_cast<size_t>(layer) * x_TD.bytes();
  require(offset + x_TD.bytes() <= memory_.bytes(), "the input of block {} is {} of {} bytes",
          layer, x_TD.describe(), memory_.bytes());
  return offset;
}

void ActivationOffload::put(int64_t layer, const Tensor& x_TD) {
  ops::copy_to_pinned(copies_, memory_, offset_of(layer, x_TD), x_TD);
}

void ActivationOffload::get(int64_t layer, const Tensor& x_TD) {
  ops::copy_from_pinned(copies_, x_TD, memory_, offset_of(layer, x_TD));
}

// ---- BlockInputs ------------------------------------------------------------------------------

BlockInputs::BlockInputs(Stream& compute, int64_t layers, ActivationOffload* offload)
    : compute_(compute), layers_(layers), offload_(offload), inputs_TD_(layers) {}

Tensor BlockInputs::begin_forward(int64_t layer, Buffer x_TD) {
  tokens_ = x_TD.tensor().rows();
  width_ = x_TD.tensor().cols();
  inputs_TD_[layer] = std::move(x_TD);
  if (travels(layer)) compute_.record(ready_);
  return inputs_TD_[layer];
}

void BlockInputs::end_forward(int64_t layer) {
  if (travels(layer)) send(layer);
  if (offload_ != nullptr && layer > 0) await_copy(compute_, sent_[(layer - 1) % 2]);
}

// Beside the block, which the stream that computes has been given before: it waits for no more than
// what has made the input. The buffer is released at once, so that its memory is free for whom the
// event has told that this copy is done, however many follow it.
void BlockInputs::send(int64_t layer) {
  Stream& copies = offload_->copies();
  copies.wait(ready_);
  copies.use(inputs_TD_[layer]);
  offload_->put(layer, inputs_TD_[layer]);
  inputs_TD_[layer].release();
  copies.record(sent_[layer % 2]);
}

Tensor BlockInputs::begin_backward(int64_t layer) {
  if (travels(layer)) wait_for_copies(fetched_);
  if (layer > 0 && travels(layer - 1)) fetch(layer - 1);
  return inputs_TD_[layer];
}

// Into memory that what the stream has been given until now no longer uses.
void BlockInputs::fetch(int64_t layer) {
  Stream& copies = offload_->copies();
  inputs_TD_[layer] = activation(compute_, "block input", tokens_, width_);
  compute_.record(ready_);
  copies.wait(ready_);
  copies.use(inputs_TD_[layer]);
  offload_->get(layer, inputs_TD_[layer]);
}

void BlockInputs::end_backward(int64_t layer) {
  inputs_TD_[layer].release();
  if (layer == 0 && offload_ != nullptr) wait_for_copies(fetched_);
}

void BlockInputs::wait_for_copies(Event& event) {
  offload_->copies().record(event);
  await_copy(compute_, event);
}

}  // namespace sbtrain
