#pragma once

namespace sbtrain {

// The machines that a run on many GPUs is planned for (train --dry-run --world). Defaults: H100 or
// H200 nodes with NVLink 4 and 400 Gb/s a GPU. `sbtrain bench collectives` measures nvlink_gbs (the
// bus bandwidth of large tensors) and latency_us (the time of small ones).
struct MachineConfig {
  double mfu = 0.4;           // model FLOPs utilisation of the passes alone, causal half
  double nvlink_gbs = 240;    // GB/s that a ring carries inside a node
  double network_gbs = 48;    // GB/s of one GPU's network port
  double latency_us = 20;     // of a collective, before its first byte
  double hop_us = 1.5;        // between GPUs of a node
  double network_hop_us = 8;  // between nodes
  double memory_gbs = 4000;   // of a GPU's memory
  double memory_gib = 139;    // of a GPU's memory, of which reserve_gib is not planned
  double reserve_gib = 2;     // stays free
  // A collective beside matrix products has NVLink to itself, but neither all multiprocessors nor
  // all of the memory's bandwidth: it takes `stretch` times as long, and products lose the share
  // `interference` of that time.
  double stretch = 3;
  double interference = 0.25;
  // The copy engines take nothing from products, but all ranks wait for the slowest GPU, which is
  // slower than the one that mfu was measured on by this share. With NCCL's kernels it hides in
  // `interference`.
  double spread = 0.035;
  bool operator==(const MachineConfig&) const = default;
};

}  // namespace sbtrain
