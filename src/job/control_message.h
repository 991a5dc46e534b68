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

inline constexpr uint32_t kProtocolVersion = 2;
// The most that rank 0 sends in one message: the texts of all members of an exchange.
inline constexpr size_t kLargestResult = size_t{1} << 30;

// The first message of a rank that joins. Rank 0 answers with a Challenge, and the rank with the
// Proof that it knows the job's secret; Welcome proves the same of rank 0. Both proofs cover the
// nonces of both, so that none can be used again.
struct Hello {
  std::string magic = "sbtrain control";
  uint32_t version = kProtocolVersion;
  std::string nonce{};
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

struct Challenge {
  std::string nonce{};
};
struct Proof {
  std::string proof{};
};
// Rank 0 has accepted a Proof.
struct Welcome {
  std::string proof{};
};
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

using Message = std::variant<Hello, Refusal, Welcome, Start, Finished, End, Beat, Texts, Failure,
                             Challenge, Proof>;

// What a rank that joins proves to know, and rank 0 in turn.
std::string proof_of_rank(std::string_view secret, const Hello& hello, const Challenge& challenge);
std::string proof_of_root(std::string_view secret, const Hello& hello, const Challenge& challenge);

// The frame of a message, length included.
std::string encode(const Message& message);
// The message of a frame without its length. Throws ExitCode::kCommunication for anything else.
Message decode(std::string_view frame);

}  // namespace sbtrain::control
