// The options of subcommands: a front for the library that reads the command line (CLI11), whose
// header takes longer to compile than any file of this folder. Only options.cpp, app.cpp, which
// parses, and manual.cpp, which reads what all commands take, include it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/enum_names.h"

namespace CLI {
class App;
class Option;
class Validator;
}  // namespace CLI

namespace sbtrain {

// What an option accepts.
class Check {
 public:
  // `test` returns what is wrong with a value, or nothing. Help shows `description`.
  using Test = std::function<std::string(const std::string&)>;
  Check(const Test& test, const std::string& description);
  explicit Check(const CLI::Validator& validator);
  // What is wrong with a value, or nothing.
  std::string operator()(const std::string& value) const;
  const CLI::Validator& validator() const { return *validator_; }

 private:
  std::shared_ptr<const CLI::Validator> validator_;
};

Check whole_numbers(int64_t low, int64_t high);
// A number from `low` to `high`; NaN is none.
Check in_range(double low, double high);
Check non_negative();
Check positive();
Check one_of_words(const std::vector<std::string>& words);

// An option or argument of a command; a handle, which may be copied. The functions that return one
// return this, so that calls can follow each other.
class Option {
 public:
  Option() = default;
  explicit Option(CLI::Option* option) : option_(option) {}

  const Option& check(const Check& check) const;
  const Option& check(const Check::Test& test, const std::string& description = "") const;
  const Option& required() const;
  const Option& needs(const Option& other) const;
  const Option& excludes(const Option& other) const;
  const Option& group(const std::string& title) const;       // of the help
  const Option& type_name(const std::string& name) const;    // in the help
  const Option& default_str(const std::string& text) const;  // in the help
  const Option& capture_default_str() const;                 // the variable's value
  const Option& delimiter(char separator) const;             // of a list in one word
  const Option& expected(int words) const;                   // negative: that many or more
  const Option& expected(int fewest, int most) const;
  const Option& allow_extra_args(bool allow) const;

  bool given() const;  // on the command line

 private:
  CLI::Option* option_ = nullptr;
};

// A command of the program, or the program itself; a handle, which may be copied.
class Command {
 public:
  explicit Command(CLI::App& app) : app_(&app) {}
  CLI::App& app() const { return *app_; }

  Command add_subcommand(const std::string& name, const std::string& help) const;
  // T is a number, a text, an optional or a list of these (options.cpp instantiates them); `value`
  // is also the default.
  template <typename T>
  Option add_option(const std::string& names, T& value, const std::string& help) const;
  // Sets a variable to true, or with names such as "!--no-graph" to false.
  Option add_flag(const std::string& names, bool& value, const std::string& help) const;
  // Calls `set` with the option's value.
  Option add_setter(const std::string& names, const std::function<void(const std::string&)>& set,
                    const std::string& help) const;
  // Accepts one of kNames<E>.
  template <typename E>
  Option add_choice(const std::string& names, E& value, const std::string& help) const;

  bool has_option(const std::string& name) const;
  Option get_option(const std::string& name) const;
  void require_subcommand(int count) const;
  void callback(const std::function<void()>& chosen) const;
  void hide() const;  // from the list of commands
  void footer(const std::function<std::string()>& text) const;

 private:
  CLI::App* app_;
};

template <typename E>
Option Command::add_choice(const std::string& names, E& value, const std::string& help) const {
  std::vector<std::string> words;
  for (const EnumName<E>& entry : kNames<E>) words.emplace_back(entry.name);
  const auto set = [&value](const std::string& word) {
    for (const EnumName<E>& entry : kNames<E>) {
      if (entry.name == word) value = entry.value;
    }
  };
  return add_setter(names, set, help)
      .check(one_of_words(words))
      .default_str(std::string(name_of(value)));
}

}  // namespace sbtrain
