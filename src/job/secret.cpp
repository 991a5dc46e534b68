#include "job/secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <random>
#include <system_error>

#include "core/error.h"
#include "core/file_descriptor.h"
#include "core/files.h"
#include "core/log.h"
#include "core/sha256.h"

namespace sbtrain::control {
namespace {

namespace fs = std::filesystem;

constexpr size_t kSecretBytes = 32;  // hexadecimal digits

// A folder of this machine that only this user can enter; nothing if there is none.
fs::path private_folder() {
  const uid_t user = ::geteuid();
  for (const char* base : {"/dev/shm", "/tmp"}) {
    fs::path folder = fs::path(base) / fmt::format("sbtrain-{}", user);
    ::mkdir(folder.c_str(), 0700);
    struct stat status {};
    const bool own = ::lstat(folder.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
                     status.st_uid == user && (status.st_mode & 077) == 0;
    if (own) return folder;
  }
  return {};
}

}  // namespace

std::string random_secret() {
  std::random_device random;
  std::string secret;
  while (secret.size() < kSecretBytes) secret += fmt::format("{:08x}", random());
  return secret;
}

void choose_secret_file(Launch& launch, const fs::path& shared) {
  if (launch.world == 1 || !launch.secret.empty()) return;
  const fs::path folder = launch.nodes == 1 ? private_folder() : shared;
  if (!folder.empty()) {
    launch.secret_file = folder / fmt::format("job-{:.16}.secret", sha256_hex(launch.token));
  } else if (launch.rank == 0) {
    log_warning(
        "the ranks of this job know each other by its name alone, which others on the network can "
        "guess: set {} to a random text for all ranks",
        kUsersSecret);
  }
}

void write_secret(const fs::path& file, const std::string& secret) {
  const auto refuse = [&](const char* what) {
    fail(ExitCode::kStorage, "{}: cannot {} the secret of this job: {}", file.string(), what,
         std::generic_category().message(errno));
  };
  const fs::path fresh = file.string() + "." + random_secret();
  FileDescriptor fd(
      ::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (fd.get() < 0) refuse("create");
  const bool written =
      ::write(fd.get(), secret.data(), secret.size()) == static_cast<ssize_t>(secret.size());
  if (written && ::rename(fresh.c_str(), file.c_str()) == 0) return;
  ::unlink(fresh.c_str());
  refuse("write");
}

std::string read_secret(const fs::path& file, std::string& problem) {
  const FileDescriptor fd(::open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat status {};
  if (fd.get() < 0 || ::fstat(fd.get(), &status) != 0) {
    problem = fmt::format("rank 0 has not left its secret in {} ({})", file.string(),
                          std::generic_category().message(errno));
    return "";
  }
  if (!S_ISREG(status.st_mode) || status.st_uid != ::geteuid() || (status.st_mode & 077) != 0) {
    problem = fmt::format("{} is not a file of this user alone", file.string());
    return "";
  }
  std::array<char, kSecretBytes + 1> text{};
  if (::read(fd.get(), text.data(), text.size()) != static_cast<ssize_t>(kSecretBytes)) {
    problem = fmt::format("{} does not hold the secret of a job", file.string());
    return "";
  }
  return {text.data(), kSecretBytes};
}

std::string authenticate(std::string_view secret, std::string_view text) {
  constexpr size_t kBlock = 64;
  std::string key(kBlock, '\0');
  if (secret.size() <= kBlock) {
    key.replace(0, secret.size(), secret);
  } else {
    const Digest digest = sha256(secret.data(), secret.size());
    key.replace(0, digest.size(), reinterpret_cast<const char*>(digest.data()), digest.size());
  }
  const auto padded = [&](char pad) {
    std::string mixed = key;
    for (char& c : mixed) c = static_cast<char>(c ^ pad);
    return mixed;
  };
  Sha256 inner;
  inner.update(padded(0x36));
  inner.update(text);
  const Digest digest = inner.finish();
  Sha256 outer;
  outer.update(padded(0x5c));
  outer.update(digest.data(), digest.size());
  return outer.hex();
}

bool equal_texts(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

std::string clean_text(std::string_view text) {
  constexpr size_t kLongest = 200;
  std::string clean(text.substr(0, kLongest));
  for (char& c : clean) {
    if (c < ' ' || c > '~') c = '?';
  }
  return clean;
}

}  // namespace sbtrain::control
