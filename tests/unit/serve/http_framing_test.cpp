#include "serve/http_framing.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace sbtrain {
namespace {

int status_of(const std::string& headers, const std::string& first = "POST /x HTTP/1.1\r\n") {
  const auto problem = framing_problem(first + headers);
  return problem ? problem->status : 0;
}

TEST(HttpFraming, PlainRequestsHaveNoProblem) {
  for (const char* headers :
       {"Host: a\r\n", "host:a\r\n\r\n", "HOST:\r\nContent-Length: 5\r\n",
        "Host: a\r\nX: b c\td\r\nX: e\r\n", "Host: a\r\nTransfer-Encoding: \t chunked \r\n",
        "Host: a\r\ntransfer-encoding: Chunked\r\n",
        "Host: a\r\nX-Content-Length: 1\r\nContent-Length: 2\r\n\r\nContent-Length: 3\r\n"}) {
    EXPECT_EQ(status_of(headers), 0) << headers;
  }
  EXPECT_EQ(status_of("", "GET / HTTP/1.0\r\n"), 0);
}

TEST(HttpFraming, WhatTwoReadersMayReadDifferentlyIsRefused) {
  const std::string host = "Host: a\r\n";
  for (const std::string& headers : std::vector<std::string>{
           "",
           host + host,
           host + "hOST: b\r\n",
           host + "Content-Length: 5\r\ncontent-length: 5\r\n",
           host + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
           host + "Transfer-Encoding: gzip\r\nContent-Length: 5\r\n",
           host + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
           host + "Content-Length : 5\r\n",
           host + "Content-Length\t: 5\r\n",
           host + "X: a\r\n b\r\n",
           host + " X: a\r\n",
           host + ": a\r\n",
           host + "a\r\n",
           host + "X\x80: a\r\n",
           host + "X: a\n",
           host + "X: a\rb\r\n",
           "Host: a\r",
           "Host: a",
           host + "X: a\nContent-Length: 5\r\n",
           host + std::string("X: \0\r\n", 6)}) {
    EXPECT_EQ(status_of(headers), 400) << headers;
  }
  EXPECT_EQ(status_of(host, "GET /\n HTTP/1.1\r\n"), 400);
  EXPECT_EQ(status_of(host + "Transfer-Encoding: chunked\r\n", "POST /x HTTP/1.0\r\n"), 400);
  EXPECT_EQ(status_of(host + host, "GET / HTTP/1.0\r\n"), 400);
}

TEST(HttpFraming, OtherCodingsAreNotImplemented) {
  for (const char* coding :
       {"gzip", "gzip, chunked", "chunked, chunked", "identity", "", "xchunked"}) {
    EXPECT_EQ(status_of("Host: a\r\nTransfer-Encoding: " + std::string(coding) + "\r\n"), 501)
        << coding;
  }
}

}  // namespace
}  // namespace sbtrain
