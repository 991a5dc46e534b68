// What every function of the C interface does around its work: it takes the caller's struct in the
// form that this library knows, makes the device the current one for the time of the call, and
// turns exceptions into a code and a text.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels/errors.h"
#include "kernels/scratch_sizes.h"
#include "kernels/types.h"
#include "sbtrain/attention.h"

namespace sbtrain::c_api {

struct Error : std::runtime_error {
  Error(int code, const std::string& text) : std::runtime_error(text), code(code) {}
  int code;
};
[[noreturn]] inline void invalid(const std::string& text) {
  throw Error(SBTRAIN_INVALID, text);
}
[[noreturn]] inline void unsupported(const std::string& text) {
  throw Error(SBTRAIN_UNSUPPORTED, text);
}
// Refuses a field by its name, with its value.
template <typename T>
void require_field(bool good, const char* name, T value, const char* expected) {
  if (!good) invalid(std::string(name) + " is " + std::to_string(value) + ", not " + expected);
}

// The caller's struct, of an older or a newer header, as this library's. What an older one lacks is
// zero; what a newer one has beyond ours must be.
template <typename T>
T take(const T* given) {
  if (given == nullptr) invalid("the struct is null");
  uint64_t size = 0;
  std::memcpy(&size, given, sizeof size);
  if (size < offsetof(T, stream)) invalid("struct_size is too small: initialise with SBTRAIN_INIT");
  T x{};
  std::memcpy(&x, given, std::min<uint64_t>(size, sizeof x));
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  const bool rest = size <= (uint64_t{1} << 16) &&
                    std::all_of(bytes + std::min<uint64_t>(size, sizeof x), bytes + size,
                                [](unsigned char byte) { return byte == 0; });
  if (x.version == 0 || x.version > SBTRAIN_ATTENTION_VERSION || !rest) {
    throw Error(SBTRAIN_VERSION, "the caller's header is version " + std::to_string(x.version) +
                                     " with fields that this library, of version " +
                                     std::to_string(SBTRAIN_ATTENTION_VERSION) +
                                     ", does not know: update the library");
  }
  return x;
}

// Throws SBTRAIN_DRIVER.
void require_driver();

// Makes a device current in the calling thread; afterwards the context that was current before is
// current again, even if that was none.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  void* before_ = nullptr;
};

// What a launch depends on.
struct Device {
  int capability = 0;       // 90
  bool much_shared = true;  // 163 KiB for a block
};
// `planned` is the caller's compute_capability. Throws SBTRAIN_UNSUPPORTED below 8.0.
Device device_of(int device, int planned);
// Whether this GPU and this build have the kernels for Hopper, for a pack and its heads.
bool has_hopper(const Device& device, int64_t tokens, int head_dim);

// Parts of the caller's workspace, one after the other. Without a pointer it only counts.
class Workspace {
 public:
  explicit Workspace(void* data = nullptr) : data_(static_cast<char*>(data)) {}
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<size_t>(count) * sizeof(T)));
  }
  void* take_bytes(size_t bytes) {
    char* const begin = data_ == nullptr ? nullptr : data_ + bytes_;
    bytes_ += kernels::align_scratch(bytes);
    return begin;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  char* data_;
  uint64_t bytes_ = 0;
};
inline void require_workspace(const void* workspace, uint64_t given, uint64_t needed) {
  if (given < needed || (workspace == nullptr && needed > 0)) {
    invalid("workspace_bytes is " + std::to_string(given) + ", but " + std::to_string(needed) +
            " are needed");
  }
  if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    invalid("workspace does not begin at a multiple of 256 bytes");
  }
}

// Runs body() and returns its code.
int report(int code, const char* text) noexcept;
template <typename Body>
int call(Body&& body) noexcept {
  try {
    body();
    return SBTRAIN_OK;
  } catch (const Error& error) {
    return report(error.code, error.what());
  } catch (const std::invalid_argument& error) {
    return report(SBTRAIN_INVALID, error.what());
  } catch (const std::runtime_error& error) {
    return report(SBTRAIN_CUDA, error.what());
  } catch (const std::exception& error) {
    return report(SBTRAIN_INTERNAL, error.what());
  }
}

}  // namespace sbtrain::c_api
