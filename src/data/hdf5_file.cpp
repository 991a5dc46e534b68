#include "data/hdf5_file.h"

#include "core/error.h"

namespace sbtrain {
namespace {

// The library's own clean-up at exit ends in a segmentation fault (seen with 1.10.8) if closing a
// file has failed before, for instance because the disk was full. All handles are closed by their
// owners, so the clean-up has nothing to do and is turned off.
struct Library {
  Library() { H5dont_atexit(); }
  std::mutex mutex;
};

std::mutex& library_mutex() {
  static Library library;
  return library.mutex;
}

// Keeps the innermost entry of the error stack, which names the cause.
herr_t keep_first(unsigned depth, const H5E_error2_t* error, void* out) {
  if (depth == 0 && error->desc != nullptr) *static_cast<std::string*>(out) = error->desc;
  return 0;
}

// Turns file locks off: many network file systems have none, and a finished store never changes.
Hdf5Handle file_access() {
  Hdf5Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_file_locking(access, false, true);
  return access;
}

// Leaves out the time of creation, so that the same content gives the same file.
Hdf5Handle dataset_properties() {
  Hdf5Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_obj_track_times(properties, false);
  return properties;
}

}  // namespace

Hdf5Lock::Hdf5Lock() : lock_(library_mutex()) {
  H5Eget_auto2(H5E_DEFAULT, &print_, &print_data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

Hdf5Lock::~Hdf5Lock() {
  H5Eset_auto2(H5E_DEFAULT, print_, print_data_);
}

Hdf5Handle& Hdf5Handle::operator=(Hdf5Handle&& other) noexcept {
  if (this != &other) {
    reset();
    id_ = std::exchange(other.id_, -1);
    close_ = other.close_;
  }
  return *this;
}

herr_t Hdf5Handle::reset() noexcept {
  return id_ >= 0 ? close_(std::exchange(id_, -1)) : 0;
}

std::string hdf5_error() {
  std::string text = "no details";
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_first, &text);
  // Failures of the file system come with the time, addresses and sizes around what matters.
  constexpr std::string_view kReason = "error message = '";
  const size_t reason = text.find(kReason);
  if (reason == std::string::npos) return text;
  text.erase(0, reason + kReason.size());
  return text.substr(0, text.find('\''));
}

// ---- Writing -------------------------------------------------------------------------------

template <typename T>
T Hdf5Writer::check(T result, const char* what) const {
  if (result < 0) fail(ExitCode::kStorage, "{}: cannot write {}: {}", path_, what, hdf5_error());
  return result;
}

Hdf5Writer::Hdf5Writer(const std::string& path) : path_(path) {
  const Hdf5Handle access = file_access();
  // Attributes of more than 64 KiB need the newer format; the bound keeps it readable by HDF5 1.10.
  check(H5Pset_libver_bounds(access, H5F_LIBVER_V110, H5F_LIBVER_V110), "the file");
  const Hdf5Handle creation(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  check(H5Pset_obj_track_times(creation, false), "the file");
  file_ = Hdf5Handle(check(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, creation, access), "the file"),
                     H5Fclose);
}

void Hdf5Writer::attribute(const char* name, int64_t value) {
  const Hdf5Handle space(check(H5Screate(H5S_SCALAR), name), H5Sclose);
  const Hdf5Handle attribute(
      check(H5Acreate2(file_, name, H5T_STD_I64LE, space, H5P_DEFAULT, H5P_DEFAULT), name),
      H5Aclose);
  check(H5Awrite(attribute, H5T_NATIVE_INT64, &value), name);
}

void Hdf5Writer::attribute(const char* name, const std::string& value) {
  const Hdf5Handle space(check(H5Screate(H5S_SCALAR), name), H5Sclose);
  const Hdf5Handle type(check(H5Tcopy(H5T_C_S1), name), H5Tclose);
  check(H5Tset_size(type, value.size() + 1), name);
  check(H5Tset_cset(type, H5T_CSET_UTF8), name);
  const Hdf5Handle attribute(
      check(H5Acreate2(file_, name, type, space, H5P_DEFAULT, H5P_DEFAULT), name), H5Aclose);
  check(H5Awrite(attribute, type, value.c_str()), name);
}

void Hdf5Writer::dataset(const char* name, hid_t type, const std::vector<hsize_t>& shape,
                         const void* data) {
  const Hdf5Handle space(
      check(H5Screate_simple(static_cast<int>(shape.size()), shape.data(), nullptr), name),
      H5Sclose);
  const Hdf5Handle properties = dataset_properties();
  const Hdf5Handle set(
      check(H5Dcreate2(file_, name, type, space, H5P_DEFAULT, properties, H5P_DEFAULT), name),
      H5Dclose);
  check(H5Dwrite(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data), name);
}

int64_t Hdf5Writer::reserve(const char* name, hid_t type, hsize_t count) {
  const Hdf5Handle space(check(H5Screate_simple(1, &count, nullptr), name), H5Sclose);
  const Hdf5Handle properties = dataset_properties();
  check(H5Pset_layout(properties, H5D_CONTIGUOUS), name);
  check(H5Pset_alloc_time(properties, H5D_ALLOC_TIME_EARLY), name);
  check(H5Pset_fill_time(properties, H5D_FILL_TIME_NEVER), name);
  const Hdf5Handle set(
      check(H5Dcreate2(file_, name, type, space, H5P_DEFAULT, properties, H5P_DEFAULT), name),
      H5Dclose);
  const haddr_t offset = H5Dget_offset(set);
  if (offset == HADDR_UNDEF) check(-1, name);
  return static_cast<int64_t>(offset);
}

void Hdf5Writer::close() {
  check(file_.reset(), "the file");
}

// ---- Reading -------------------------------------------------------------------------------

template <typename T>
T Hdf5Reader::check(T result, const char* what) const {
  if (result < 0) fail(ExitCode::kData, "{}: cannot read {}: {}", path_, what, hdf5_error());
  return result;
}

Hdf5Reader::Hdf5Reader(const std::string& path) : path_(path) {
  const Hdf5Handle access = file_access();
  file_ = Hdf5Handle(check(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access), "the file"), H5Fclose);
}

int64_t Hdf5Reader::integer(const char* name) const {
  const Hdf5Handle attribute(check(H5Aopen(file_, name, H5P_DEFAULT), name), H5Aclose);
  const Hdf5Handle space(check(H5Aget_space(attribute), name), H5Sclose);
  if (H5Sget_simple_extent_npoints(space) != 1) check(-1, name);
  int64_t value = 0;
  check(H5Aread(attribute, H5T_NATIVE_INT64, &value), name);
  return value;
}

std::string Hdf5Reader::text(const char* name) const {
  const Hdf5Handle attribute(check(H5Aopen(file_, name, H5P_DEFAULT), name), H5Aclose);
  const Hdf5Handle type(check(H5Aget_type(attribute), name), H5Tclose);
  const Hdf5Handle space(check(H5Aget_space(attribute), name), H5Sclose);
  if (H5Tget_class(type) != H5T_STRING || H5Tis_variable_str(type) != 0 ||
      H5Sget_simple_extent_npoints(space) != 1) {
    fail(ExitCode::kData, "{}: attribute {} is not a string of fixed size", path_, name);
  }
  std::string value(H5Tget_size(type), '\0');
  check(H5Aread(attribute, type, value.data()), name);
  value.resize(value.find('\0') == std::string::npos ? value.size() : value.find('\0'));
  return value;
}

void Hdf5Reader::dataset(const char* name, hid_t type, hsize_t count, void* out) const {
  const Hdf5Handle set(check(H5Dopen2(file_, name, H5P_DEFAULT), name), H5Dclose);
  const Hdf5Handle space(check(H5Dget_space(set), name), H5Sclose);
  const hssize_t points = H5Sget_simple_extent_npoints(space);
  if (points < 0 || static_cast<hsize_t>(points) != count) {
    fail(ExitCode::kData, "{}: {} has {} elements, expected {}", path_, name, points, count);
  }
  check(H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out), name);
}

}  // namespace sbtrain
