// A library that is loaded when it is first needed, so that the program starts, and starts fast,
// without it.
#pragma once

#include <functional>
#include <initializer_list>
#include <string>

namespace sbtrain {

// What this machine has of a library that is loaded when it is needed.
struct FoundLibrary {
  std::string name;
  std::string version{};  // empty if it cannot be used
  std::string path{};     // the file; empty if there is none
  std::string problem{};  // why it cannot be used, and what to do; empty if it can
};

// It stays loaded until the process ends, unless it is unloaded.
class SharedLibrary {
 public:
  // Loads the first of `paths` that can be loaded. Throws ExitCode::kConfig, with the loader's
  // reason and with `advice` on what to do, if none can.
  SharedLibrary(std::string name, std::initializer_list<const char*> paths, std::string advice);

  // Sets the pointer to the library's function of that name, which is taken to have the pointer's
  // type. Throws ExitCode::kConfig if the library has none.
  template <typename Function>
  void find(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(address(name));
  }
  // The same, but null if the library has none.
  template <typename Function>
  void find_if_there(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(address_or_null(name));
  }
  // The address of the library's variable of that name. Throws ExitCode::kConfig if it has none.
  void* variable(const char* name) const { return address(name); }

  // The file that has been loaded.
  std::string path() const;

  // What dlopen() has returned, for code that looks for functions itself.
  void* handle() const { return handle_; }

  // Its functions must not be called afterwards.
  void unload();

 private:
  void* address(const char* name) const;
  void* address_or_null(const char* name) const;

  std::string name_, advice_;
  void* handle_ = nullptr;
};

// "9.14.0" of 91400, as cuDNN, cuBLASLt and NCCL write their versions.
std::string dotted_version(size_t version);

// Loads a library to see whether it can be used: `load` returns its version and its file, or throws
// Error with the reason.
FoundLibrary look_for(const std::string& name,
                      const std::function<void(FoundLibrary& library)>& load);

}  // namespace sbtrain
