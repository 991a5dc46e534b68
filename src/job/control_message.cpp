#include "job/control_message.h"

#include <array>
#include <limits>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "job/secret.h"

namespace sbtrain::control {
namespace {

// The fields of each message, in the order of their bytes; Writer and Reader visit the same list.
template <class Archive, class M>
void visit_fields(Archive& archive, M& m) {
  using T = std::remove_const_t<M>;
  if constexpr (std::is_same_v<T, Hello>) {
    archive(m.magic), archive(m.version), archive(m.nonce), archive(m.rank), archive(m.world);
    archive(m.host), archive(m.pid);
  } else if constexpr (std::is_same_v<T, Challenge>) {
    archive(m.nonce);
  } else if constexpr (std::is_same_v<T, Proof> || std::is_same_v<T, Welcome>) {
    archive(m.proof);
  } else if constexpr (std::is_same_v<T, Refusal>) {
    archive(m.reason), archive(m.retry);
  } else if constexpr (std::is_same_v<T, Beat>) {
    archive(m.doing), archive(m.waits_for), archive(m.age_ms), archive(m.allowance_ms);
  } else if constexpr (std::is_same_v<T, Texts>) {
    archive(m.topic), archive(m.members), archive(m.texts);
  } else if constexpr (std::is_same_v<T, Failure>) {
    archive(m.code), archive(m.message);
  } else {
    static_assert(std::is_empty_v<T>);
  }
}

template <class T>
constexpr bool kIsNumber = std::is_integral_v<T>;

class Writer {
 public:
  explicit Writer(std::string& bytes) : bytes_(bytes) {}

  template <class T>
  void operator()(const T& value) {
    if constexpr (kIsNumber<T>) {
      number(static_cast<uint64_t>(value), sizeof(T));
    } else if constexpr (std::is_same_v<T, std::string>) {
      number(value.size(), sizeof(uint32_t));
      bytes_ += value;
    } else {
      number(value.size(), sizeof(uint32_t));
      for (const auto& item : value) (*this)(item);
    }
  }

 private:
  void number(uint64_t value, size_t size) {
    for (size_t i = 0; i < size; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xff);
  }
  std::string& bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <class T>
  void operator()(T& value) {
    if constexpr (kIsNumber<T>) {
      value = static_cast<T>(number(sizeof(T)));
    } else if constexpr (std::is_same_v<T, std::string>) {
      value = take(number(sizeof(uint32_t)));
    } else {
      // Every item has at least four bytes, so a false count cannot reserve more than arrived.
      const uint64_t count = number(sizeof(uint32_t));
      if (count > rest_.size() / sizeof(uint32_t)) malformed();
      value.resize(count);
      for (auto& item : value) (*this)(item);
    }
  }
  uint64_t number(size_t size) {
    const std::string_view bytes = take(size);
    uint64_t value = 0;
    for (size_t i = size; i-- > 0;) value = value << 8 | static_cast<uint8_t>(bytes[i]);
    return value;
  }
  bool empty() const { return rest_.empty(); }

  [[noreturn]] static void malformed() {
    fail(ExitCode::kCommunication, "a message of the control channel is malformed");
  }

 private:
  std::string_view take(uint64_t size) {
    if (size > rest_.size()) malformed();
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  std::string_view rest_;
};

template <size_t I = 0>
Message empty_message(size_t kind) {
  if constexpr (I < std::variant_size_v<Message>) {
    return kind == I ? Message(std::in_place_index<I>) : empty_message<I + 1>(kind);
  } else {
    Reader::malformed();
  }
}

std::string proof(std::string_view who, std::string_view secret, const Hello& hello,
                  const Challenge& challenge) {
  return authenticate(secret, fmt::format("sbtrain {} {} {} of {} {} {}", who, hello.version,
                                          hello.rank, hello.world, hello.nonce, challenge.nonce));
}

}  // namespace

std::string proof_of_rank(std::string_view secret, const Hello& hello, const Challenge& challenge) {
  return proof("rank", secret, hello, challenge);
}

std::string proof_of_root(std::string_view secret, const Hello& hello, const Challenge& challenge) {
  return proof("root", secret, hello, challenge);
}

std::string encode(const Message& message) {
  constexpr size_t kLength = sizeof(uint32_t);
  std::string frame(kLength, '\0');
  frame += static_cast<char>(message.index());
  Writer writer(frame);
  std::visit([&](const auto& m) { visit_fields(writer, m); }, message);
  const size_t size = frame.size() - kLength;
  require(size <= std::numeric_limits<uint32_t>::max(), "a message of {} bytes", size);
  std::string length;
  Writer writer_of_length(length);
  writer_of_length(static_cast<uint32_t>(size));
  return frame.replace(0, kLength, length);
}

Message decode(std::string_view frame) {
  Reader reader(frame);
  Message message = empty_message(reader.number(1));
  std::visit([&](auto& m) { visit_fields(reader, m); }, message);
  if (!reader.empty()) Reader::malformed();
  return message;
}

}  // namespace sbtrain::control
