// HDF5's C interface with handles that close themselves and errors that are thrown. The C library
// is not assumed to be thread-safe: hold Hdf5Lock around every use.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace sbtrain {

// Exclusive use of the library, with its own error printing turned off.
class Hdf5Lock {
 public:
  Hdf5Lock();
  ~Hdf5Lock();
  Hdf5Lock(const Hdf5Lock&) = delete;
  Hdf5Lock& operator=(const Hdf5Lock&) = delete;

 private:
  std::unique_lock<std::mutex> lock_;
  H5E_auto2_t print_ = nullptr;
  void* print_data_ = nullptr;
};

class Hdf5Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Hdf5Handle() = default;
  Hdf5Handle(hid_t id, Close close) : id_(id), close_(close) {}
  Hdf5Handle(Hdf5Handle&& other) noexcept
      : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Hdf5Handle& operator=(Hdf5Handle&& other) noexcept;
  ~Hdf5Handle() { reset(); }
  herr_t reset() noexcept;
  operator hid_t() const { return id_; }  // NOLINT: a handle is used as its id

 private:
  hid_t id_ = -1;
  Close close_ = nullptr;
};

// The library's own description of its last error.
std::string hdf5_error();

// Attributes and datasets of an open file. Failures throw ExitCode::kStorage (writing) or kData
// (reading) with `path` and the object's name.
class Hdf5Writer {
 public:
  explicit Hdf5Writer(const std::string& path);
  void attribute(const char* name, int64_t value);
  void attribute(const char* name, const std::string& value);
  void dataset(const char* name, hid_t type, const std::vector<hsize_t>& shape, const void* data);
  // Creates a dataset of `count` elements without writing them; returns its offset in the file.
  int64_t reserve(const char* name, hid_t type, hsize_t count);
  void close();

 private:
  template <typename T>
  T check(T result, const char* what) const;
  std::string path_;
  Hdf5Handle file_;
};

class Hdf5Reader {
 public:
  explicit Hdf5Reader(const std::string& path);
  int64_t integer(const char* name) const;
  std::string text(const char* name) const;
  // The dataset must have this many elements, in a type that converts to `type`.
  void dataset(const char* name, hid_t type, hsize_t count, void* out) const;

 private:
  template <typename T>
  T check(T result, const char* what) const;
  std::string path_;
  Hdf5Handle file_;
};

}  // namespace sbtrain
