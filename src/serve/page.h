// The page at /, which shows what the model writes, how likely it finds each token, and what its
// heads attend to.
#pragma once

#include "serve/http_server.h"

namespace sbtrain {

HttpResponse page();

}  // namespace sbtrain
