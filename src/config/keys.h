// The list of all keys, made once from the schema.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sbtrain::schema {

struct Key {
  enum class Kind { kScalar, kTexts, kSection, kList };
  std::string path;  // "train.lr"; "*" stands for the index of a list's item
  Kind kind = Kind::kScalar;
  std::string type;           // "number"
  std::string default_value;  // kScalar and kTexts
  std::string range;          // "at least 0"; may be empty
  std::string condition;      // "type softmax"; may be empty
  std::string help;
  std::vector<std::string> choices;
  bool required = false;
  bool single = false;  // a list whose only item may be written without a list
};

// All keys in the order of the schema, each section before its keys.
const std::vector<Key>& all_keys();

// The key that `path` names, with list indices or "*"; null when there is none. A list that
// allows a single item may be named without an index; an item of a list of texts gives that list.
const Key* find_key(std::string_view path);

// `path` without the "*" of a list whose single item needs no index: how a user would write it.
std::string short_path(const std::string& path);

// The first key whose last segment is `word`, or that is called so in other trainers; null when
// there is none.
const Key* find_key_ending(std::string_view word);

// "; did you mean 'train.lr'?", or nothing when no key is near `path`.
std::string did_you_mean(std::string_view path);

std::vector<std::string> split_path(std::string_view path);
bool is_index(std::string_view segment);

}  // namespace sbtrain::schema
