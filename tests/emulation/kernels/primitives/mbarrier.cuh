// Replaces mbarriers (emulation/emulator.h): a phase is complete when all threads have arrived and
// all bytes that they announced have been copied.
#pragma once

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"

namespace sbtrain::kernels {

class Mbarrier {
 public:
  void init(int arrivals) {
    emulation::check(arrivals > 0 && arrivals <= 255, "an mbarrier of so many arrivals");
    arrivals_ = static_cast<uint8_t>(arrivals);
    pending_ = static_cast<int16_t>(arrivals);
    parity_ = 0;
    bytes_ = 0;
  }
  void arrive() {
    emulation::check(pending_ > 0, "more arrivals at an mbarrier than it was made for");
    --pending_;
    complete_phase();
  }
  void arrive_and_expect(int bytes) {
    bytes_ += bytes;
    arrive();
  }
  void arrive_after_copies() { arrive(); }
  void wait(uint32_t parity) {
    emulation::wait_until(parity == 0 ? "an even phase of the mbarrier at byte"
                                      : "an odd phase of the mbarrier at byte",
                          address(), [this, parity] { return parity_ != parity; });
  }
  uint32_t address() const { return shared_address(this); }
  // A copy that counts for the current phase is complete.
  void copied(int bytes) {
    bytes_ -= bytes;
    complete_phase();
  }

 private:
  void complete_phase() {
    if (pending_ > 0 || bytes_ != 0) return;
    parity_ ^= 1;
    pending_ = arrivals_;
  }

  int32_t bytes_;
  int16_t pending_;
  uint8_t arrivals_, parity_;
};
static_assert(sizeof(Mbarrier) == 8);

inline void fence_mbarrier_init() {}

}  // namespace sbtrain::kernels
