// The options of one module, held as a value that can be copied and compared. Only the module knows
// the type of the struct.
#pragma once

#include <memory>

#include "core/error.h"

namespace sbtrain {

// An object that holds nothing stands for the defaults of the module's struct, whichever it is.
class ModuleOptions {
 public:
  ModuleOptions() = default;
  template <class T>
  explicit ModuleOptions(T options) : held_(std::make_unique<Held<T>>(std::move(options))) {}
  ModuleOptions(const ModuleOptions& other) : held_(other.held_ ? other.held_->copy() : nullptr) {}
  ModuleOptions(ModuleOptions&&) = default;
  ModuleOptions& operator=(ModuleOptions other) {
    held_ = std::move(other.held_);
    return *this;
  }
  ~ModuleOptions() = default;

  // The options as a T; if nothing is held, a T with its defaults. Throws ExitCode::kInternal when
  // they are another module's.
  template <class T>
  T& as() {
    if (!held_) held_ = std::make_unique<Held<T>>(T{});
    auto* held = dynamic_cast<Held<T>*>(held_.get());
    require(held != nullptr, "the options belong to another module");
    return held->value;
  }
  template <class T>
  const T& as() const {
    static const T kDefaults{};
    if (!held_) return kDefaults;
    const auto* held = dynamic_cast<const Held<T>*>(held_.get());
    require(held != nullptr, "the options belong to another module");
    return held->value;
  }

  friend bool operator==(const ModuleOptions& a, const ModuleOptions& b) {
    if (!a.held_ || !b.held_) {
      return (!a.held_ || a.held_->is_default()) && (!b.held_ || b.held_->is_default());
    }
    return a.held_->equals(*b.held_);
  }

 private:
  struct Base {
    virtual ~Base() = default;
    virtual std::unique_ptr<Base> copy() const = 0;
    virtual bool equals(const Base& other) const = 0;
    virtual bool is_default() const = 0;
  };
  template <class T>
  struct Held : Base {
    explicit Held(T options) : value(std::move(options)) {}
    std::unique_ptr<Base> copy() const override { return std::make_unique<Held>(value); }
    bool equals(const Base& other) const override {
      const auto* same = dynamic_cast<const Held*>(&other);
      return same != nullptr && same->value == value;
    }
    bool is_default() const override { return value == T{}; }
    T value;
  };
  std::unique_ptr<Base> held_;
};

}  // namespace sbtrain
