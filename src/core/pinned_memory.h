// Memory of the host that a device can copy to while both go on working.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/backend.h"

namespace sbtrain {

// On a GPU the memory is page-locked, piece by piece, so that the process can do other things with
// the driver in between. Where the system refuses to lock more, the rest stays pageable: copies to
// it work, but the host waits for them.
class PinnedMemory {
 public:
  // A copy must not cross a multiple of this many bytes from the start.
  static constexpr size_t kPiece = size_t{64} << 20;

  // Throws ExitCode::kOutOfMemory if the host cannot give the memory; `what` it is for begins the
  // message. Takes about 0.3 s for each GiB on a GPU, during which the pages are made; any thread
  // may do it. A plan has no memory.
  PinnedMemory(Backend backend, size_t bytes, std::string_view what);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return data_; }  // null in a plan
  size_t bytes() const { return bytes_; }
  // Why some of the memory is pageable; empty: none is.
  const std::string& refused() const { return refused_; }

 private:
  void pin();
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  std::vector<void*> pinned_;  // pieces
  std::string refused_;
};

}  // namespace sbtrain
