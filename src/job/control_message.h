// The messages of job/control.h between rank 0 and the others, and their bytes.
//
// A message is a frame: the length of what follows (u32), the kind (u8), the fields. Numbers are
// little-endian; texts and lists have their length (u32) in front. Both ends run the same build
// (job/agreement.h), but Hello keeps its layout over versions, so that another version is
// refused by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace sbtrain::control {

inline constexpr uint32_t kProtocolVersion = 1;
// The most that rank 0 sends in one message: the texts of all members of an exchange.
inline constexpr size_t kLargestResult = size_t{1} << 30;

// The first message of a rank that joins.
struct Hello {
  std::string magic = "sbtrain control";
  uint32_t version = kProtocolVersion;
  std::string token{};
  uint32_t rank = 0;
  uint32_t world = 0;
  std::string host{};
  uint32_t pid = 0;
};

// Rank 0 does not accept a Hello. `retry`: another job listens here, and may end soon.
struct Refusal {
  std::string reason;
  bool retry = false;
};

struct Welcome {};   // rank 0 has accepted a Hello
struct Start {};     // all ranks are there
struct Finished {};  // the sender is done
struct End {};       // all ranks are done

// A sign of life.
struct Beat {
  std::string doing{};        // the last word of progress()
  std::string waits_for{};    // the last word of waits_for()
  uint64_t age_ms = 0;        // since progress() was called
  uint64_t allowance_ms = 0;  // what is left of its allowance
};

// The text of one rank for an exchange or, from rank 0, the texts of all members.
struct Texts {
  std::string topic{};
  std::vector<uint32_t> members{};
  std::vector<std::string> texts{};
};

struct Failure {
  uint32_t code = 0;
  std::string message{};
};

using Message = std::variant<Hello, Refusal, Welcome, Start, Finished, End, Beat, Texts, Failure>;

// The frame of a message, length included.
std::string encode(const Message& message);
// The message of a frame without its length. Throws ExitCode::kCommunication for anything else.
Message decode(std::string_view frame);

}  // namespace sbtrain::control
