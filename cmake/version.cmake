# Writes the git revision to OUTPUT, but only if it has changed. Run at build time:
#   cmake -DSOURCE=... -DOUTPUT=... -DVERSION=... -P version.cmake
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12
                OUTPUT_VARIABLE revision ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT revision)
  set(revision "unknown")
endif()
string(CONCAT text "#include \"core/version.h\"\n\nnamespace sbtrain {\n\n"
              "const char* version() {\n  return \"${VERSION}\";\n}\n\n"
              "const char* git_revision() {\n  return \"${revision}\";\n}\n\n}  // namespace sbtrain\n")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT "${old}" STREQUAL "${text}")
  file(WRITE ${OUTPUT} "${text}")
endif()
