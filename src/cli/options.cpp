#include "cli/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <optional>

namespace sbtrain {

Check::Check(const Test& test, const std::string& description)
    : validator_(std::make_shared<CLI::Validator>(
          [test](const std::string& value) { return test(value); }, description)) {}

Check::Check(const CLI::Validator& validator)
    : validator_(std::make_shared<CLI::Validator>(validator)) {}

std::string Check::operator()(const std::string& value) const {
  std::string copy = value;  // which a validator may change
  return (*validator_)(copy);
}

Check whole_numbers(int64_t low, int64_t high) {
  return Check(CLI::Range(low, high));
}

// CLI::Range asks whether the value lies outside, and no comparison with NaN is true.
Check in_range(double low, double high) {
  const std::string range = fmt::format("{:g} to {:g}", low, high);
  const auto check = [low, high, range](const std::string& text) {
    double value = 0;
    const bool number = CLI::detail::lexical_cast(text, value);
    if (number && value >= low && value <= high) return std::string();
    return fmt::format("'{}' is not a number from {}", text, range);
  };
  return Check(CLI::Validator(check, range, "RANGE"));
}

Check non_negative() {
  return Check(CLI::NonNegativeNumber);
}

Check positive() {
  return Check(CLI::PositiveNumber);
}

Check one_of_words(const std::vector<std::string>& words) {
  return Check(CLI::IsMember(words));
}

const Option& Option::check(const Check& check) const {
  option_->check(check.validator());
  return *this;
}
const Option& Option::check(const Check::Test& test, const std::string& description) const {
  option_->check([test](const std::string& value) { return test(value); }, description);
  return *this;
}
const Option& Option::required() const {
  option_->required();
  return *this;
}
const Option& Option::needs(const Option& other) const {
  option_->needs(other.option_);
  return *this;
}
const Option& Option::excludes(const Option& other) const {
  option_->excludes(other.option_);
  return *this;
}
const Option& Option::group(const std::string& title) const {
  option_->group(title);
  return *this;
}
const Option& Option::type_name(const std::string& name) const {
  option_->type_name(name);
  return *this;
}
const Option& Option::default_str(const std::string& text) const {
  option_->default_str(text);
  return *this;
}
const Option& Option::capture_default_str() const {
  option_->capture_default_str();
  return *this;
}
const Option& Option::delimiter(char separator) const {
  option_->delimiter(separator);
  return *this;
}
const Option& Option::expected(int words) const {
  option_->expected(words);
  return *this;
}
const Option& Option::expected(int fewest, int most) const {
  option_->expected(fewest, most);
  return *this;
}
const Option& Option::allow_extra_args(bool allow) const {
  option_->allow_extra_args(allow);
  return *this;
}
bool Option::given() const {
  return option_->count() > 0;
}

Command Command::add_subcommand(const std::string& name, const std::string& help) const {
  return Command(*app_->add_subcommand(name, help));
}

template <typename T>
Option Command::add_option(const std::string& names, T& value, const std::string& help) const {
  return Option(app_->add_option(names, value, help));
}
using Text = const std::string&;
template Option Command::add_option(Text, std::string&, Text) const;
template Option Command::add_option(Text, int&, Text) const;
template Option Command::add_option(Text, int64_t&, Text) const;
template Option Command::add_option(Text, uint64_t&, Text) const;
template Option Command::add_option(Text, double&, Text) const;
template Option Command::add_option(Text, std::optional<double>&, Text) const;
template Option Command::add_option(Text, std::vector<std::string>&, Text) const;
template Option Command::add_option(Text, std::vector<int>&, Text) const;
template Option Command::add_option(Text, std::vector<int64_t>&, Text) const;
template Option Command::add_option(Text, std::vector<double>&, Text) const;

Option Command::add_flag(const std::string& names, bool& value, const std::string& help) const {
  return Option(app_->add_flag(names, value, help));
}
Option Command::add_setter(const std::string& names,
                           const std::function<void(const std::string&)>& set,
                           const std::string& help) const {
  return Option(app_->add_option_function<std::string>(names, set, help));
}
bool Command::has_option(const std::string& name) const {
  return app_->get_option_no_throw(name) != nullptr;
}
Option Command::get_option(const std::string& name) const {
  return Option(app_->get_option(name));
}
void Command::require_subcommand(int count) const {
  app_->require_subcommand(count);
}
void Command::callback(const std::function<void()>& chosen) const {
  app_->callback(chosen);
}
void Command::hide() const {
  app_->group("");
}
void Command::footer(const std::function<std::string()>& text) const {
  app_->footer(text);
}

}  // namespace sbtrain
