// What was built.
#pragma once

namespace sbtrain {

const char* version();       // "0.2.0"
const char* git_revision();  // of the source tree at the build; ends in "-dirty" if changed

}  // namespace sbtrain
