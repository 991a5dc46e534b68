// A library that is loaded when it is first needed, so that the program starts, and starts fast,
// without it.
#pragma once

#include <initializer_list>
#include <string>

namespace sbtrain {

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

}  // namespace sbtrain
