// What the ranks of a job know and others do not, by which they recognise each other.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "job/launch.h"

namespace sbtrain::control {

// 128 random bits.
std::string random_secret();

// Where the launcher has given the ranks no secret (Launch::secret), rank 0 makes one and leaves it
// in a file that only its user can read: in a folder of this machine for a job of one machine,
// otherwise in `shared`, a folder that all ranks see (empty: there is none). This chooses the file
// (Launch::secret_file). Where there is none, the job's name has to do, which others may guess, and
// rank 0 says so.
void choose_secret_file(Launch& launch, const std::filesystem::path& shared);

// Throws ExitCode::kStorage.
void write_secret(const std::filesystem::path& file, const std::string& secret);
// Of a file that its user alone can have written; otherwise nothing and the `problem`.
std::string read_secret(const std::filesystem::path& file, std::string& problem);

// HMAC-SHA-256 in hexadecimal digits (RFC 2104).
std::string authenticate(std::string_view secret, std::string_view text);
// Takes as long for wrong texts as for almost right ones.
bool equal_texts(std::string_view a, std::string_view b);

// For messages, of what a stranger may have written: printable ASCII, and not too long.
std::string clean_text(std::string_view text);

}  // namespace sbtrain::control
