#include "core/shared_library.h"

#include <dlfcn.h>
#include <link.h>

#include <utility>

#include "core/error.h"

namespace sbtrain {

SharedLibrary::SharedLibrary(std::string name, std::initializer_list<const char*> paths,
                             std::string advice)
    : name_(std::move(name)), advice_(std::move(advice)) {
  std::string reason;
  for (const char* path : paths) {
    handle_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) return;
    if (reason.empty()) reason = dlerror();
  }
  fail(ExitCode::kConfig, "cannot load {} ({}): {}", name_, reason, advice_);
}

std::string SharedLibrary::path() const {
  link_map* map = nullptr;
  return dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

void SharedLibrary::unload() {
  dlclose(std::exchange(handle_, nullptr));
}

void* SharedLibrary::address_or_null(const char* name) const {
  return dlsym(handle_, name);
}

void* SharedLibrary::address(const char* name) const {
  void* found = address_or_null(name);
  if (found == nullptr) fail(ExitCode::kConfig, "{} has no {}: {}", name_, name, advice_);
  return found;
}

std::string dotted_version(size_t version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

FoundLibrary look_for(const std::string& name,
                      const std::function<void(FoundLibrary& library)>& load) {
  FoundLibrary library{.name = name};
  try {
    load(library);
  } catch (const Error& error) {
    library.version.clear();
    library.problem = error.what();
  }
  return library;
}

}  // namespace sbtrain
