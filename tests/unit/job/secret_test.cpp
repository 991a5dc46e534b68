#include "job/secret.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "support/process.h"

namespace sbtrain {
namespace {

namespace fs = std::filesystem;
using namespace control;  // NOLINT

// RFC 4231, cases 1, 2 and 6.
TEST(Secret, AuthenticatesAsTheStandardSays) {
  EXPECT_EQ(authenticate(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(authenticate("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(authenticate(std::string(131, '\xaa'),
                         "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Secret, AFileIsForItsUserAlone) {
  const test::TemporaryFolder folder;
  const fs::path file = folder / "secret";
  std::string problem;
  EXPECT_EQ(read_secret(file, problem), "");
  EXPECT_NE(problem.find("has not left its secret in " + file.string()), std::string::npos);
  const std::string secret = random_secret();
  EXPECT_NE(secret, random_secret());
  for (const std::string& text : {random_secret(), secret}) write_secret(file, text);
  EXPECT_EQ(read_secret(file, problem), secret);
  EXPECT_EQ(fs::status(file).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
  fs::permissions(file, fs::perms::others_read, fs::perm_options::add);
  EXPECT_EQ(read_secret(file, problem), "");
  EXPECT_NE(problem.find("this user alone"), std::string::npos);
  fs::remove(file);
  fs::create_symlink("/etc/hostname", file);
  EXPECT_EQ(read_secret(file, problem), "");
}

TEST(Secret, TheFileIsOfThisMachineOrSharedByAll) {
  Launch launch{.world = 4, .nodes = 1, .token = "a job"};
  choose_secret_file(launch, "/run/folder");
  EXPECT_FALSE(launch.secret_file.string().starts_with("/run/folder"));
  struct stat status {};
  ASSERT_EQ(::stat(launch.secret_file.parent_path().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0700U);
  launch = {.world = 4, .nodes = 2, .token = "a job"};
  choose_secret_file(launch, "/run/folder");
  EXPECT_EQ(launch.secret_file.parent_path(), "/run/folder");
  Launch other{.world = 4, .nodes = 2, .token = "another"};
  choose_secret_file(other, "/run/folder");
  EXPECT_NE(other.secret_file, launch.secret_file);
  launch = {.world = 4, .nodes = 2, .token = "a job"};
  choose_secret_file(launch, "");
  EXPECT_TRUE(launch.secret_file.empty());
  launch = {.world = 4, .nodes = 2, .token = "a job", .secret = "known"};
  choose_secret_file(launch, "/run/folder");
  EXPECT_TRUE(launch.secret_file.empty());
}

TEST(Secret, StrangersTextsAreCleaned) {
  EXPECT_EQ(clean_text("node-7.example"), "node-7.example");
  EXPECT_EQ(clean_text("a\nb\x1b[0m\xff\x7f"), "a?b?[0m??");
  EXPECT_EQ(clean_text(std::string(5000, 'x')).size(), 200U);
}

}  // namespace
}  // namespace sbtrain
