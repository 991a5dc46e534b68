#include "serve/page.h"

#include "serve/page_html.h"

namespace sbtrain {

HttpResponse page() {
  HttpResponse response;
  response.type = "text/html; charset=utf-8";
  response.body.assign(reinterpret_cast<const char*>(kPageHtml), sizeof(kPageHtml));  // NOLINT
  // All of the page is in this one file, and it talks to this server only.
  response.headers.emplace_back("Content-Security-Policy",
                                "default-src 'none'; style-src 'unsafe-inline'; script-src "
                                "'unsafe-inline'; connect-src 'self'; img-src data:; "
                                "frame-ancestors 'none'; base-uri 'none'; form-action 'none'");
  response.headers.emplace_back("X-Content-Type-Options", "nosniff");
  response.headers.emplace_back("Referrer-Policy", "no-referrer");
  return response;
}

}  // namespace sbtrain
