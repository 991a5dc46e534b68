# Writes the git revision and what is built to OUTPUT, but only if it has changed. Run at build time:
#   cmake -DSOURCE=... -DOUTPUT=... -DVERSION=... -DREVISION=... -DCUDA=... -DNATIVE=... -P version.cmake
# REVISION replaces git's where there is no repository, as in the build of a container image. CUDA and NATIVE say what
# was built (core/version.h).
set(revision "${REVISION}")
if(NOT revision)
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty --abbrev=12
                  OUTPUT_VARIABLE revision ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT revision)
  set(revision "unknown")
endif()
set(native false)
if(NATIVE)
  set(native true)
endif()
string(CONCAT text "#include \"core/version.h\"\n\nnamespace sbtrain {\n\n"
              "const char* version() {\n  return \"${VERSION}\";\n}\n\n"
              "const char* git_revision() {\n  return \"${revision}\";\n}\n\n"
              "const char* cuda_build() {\n  return \"${CUDA}\";\n}\n\n"
              "bool native_build() {\n  return ${native};\n}\n\n}  // namespace sbtrain\n")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT "${old}" STREQUAL "${text}")
  file(WRITE ${OUTPUT} "${text}")
endif()
