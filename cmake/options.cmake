# Compiler options that every target of the project shares, and the helper that adds a library.
add_library(sbtrain_options INTERFACE)
target_compile_options(sbtrain_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -fno-math-errno -fno-trapping-math -fopenmp>)
target_include_directories(sbtrain_options INTERFACE ${CMAKE_SOURCE_DIR}/src ${CMAKE_BINARY_DIR}/include)
target_link_libraries(sbtrain_options INTERFACE fmt::fmt OpenMP::OpenMP_CXX Threads::Threads)
if(SBTRAIN_NATIVE)
  target_compile_options(sbtrain_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=native>)
endif()
if(SBTRAIN_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "SBTRAIN_FUZZ needs libFuzzer, which comes with clang: "
                        "use the preset fuzz, or -DCMAKE_CXX_COMPILER=clang++-14")
  endif()
  target_compile_options(sbtrain_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=fuzzer-no-link>)
endif()
if(SBTRAIN_SANITIZE)
  target_compile_options(sbtrain_options INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined -fno-omit-frame-pointer -fno-sanitize-recover=undefined>)
  target_link_options(sbtrain_options INTERFACE -fsanitize=address,undefined)
endif()

# What most files include takes longer to read than the files themselves, so it is compiled once, for each set of
# compiler options: here for src/, in tests/CMakeLists.txt for the tests. A file still includes what it uses, which
# the build with the sanitizers checks: it has no precompiled headers.
# sbtrain_precompile(name HEADERS ... LINK ...) makes the precompiled headers that REUSE_FROM names.
function(sbtrain_precompile name)
  cmake_parse_arguments(ARG "" "" "HEADERS;LINK" ${ARGN})
  add_library(${name} OBJECT ${PROJECT_SOURCE_DIR}/cmake/precompiled.cpp)
  target_link_libraries(${name} PUBLIC sbtrain_options ${ARG_LINK})
  target_precompile_headers(${name} PRIVATE ${ARG_HEADERS})
endfunction()
set(common_headers <fmt/format.h> <fmt/ranges.h> <nlohmann/json.hpp> <algorithm> <array> <chrono> <cmath> <cstdint>
                   <filesystem> <fstream> <functional> <map> <memory> <mutex> <optional> <random> <set> <span> <string>
                   <string_view> <thread> <utility> <variant> <vector>)
sbtrain_precompile(sbtrain_precompiled HEADERS ${common_headers} LINK nlohmann_json::nlohmann_json)

# sbtrain_library(name SOURCES ... LINK ...)
function(sbtrain_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(sbtrain_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(sbtrain_${name} PUBLIC sbtrain_options ${ARG_LINK})
  target_precompile_headers(sbtrain_${name} REUSE_FROM sbtrain_precompiled)
endfunction()

# sbtrain_test(name LABELS ... [SERIAL] SOURCES ... LINK ...) adds one GoogleTest program with one CTest
# entry per test. With SERIAL no other test runs at the same time.
function(sbtrain_test name)
  cmake_parse_arguments(ARG "SERIAL" "" "LABELS;SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE sbtrain_options ${ARG_LINK} GTest::gtest GTest::gtest_main)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  target_precompile_headers(${name} REUSE_FROM sbtrain_tests_precompiled)
  include(GoogleTest)
  gtest_discover_tests(${name} NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 900 RUN_SERIAL ${ARG_SERIAL})
endfunction()
