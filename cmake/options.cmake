# Compiler options that every target of the project shares, and the helper that adds a library.
add_library(sbtrain_options INTERFACE)
target_compile_options(sbtrain_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -fno-math-errno -fno-trapping-math -fopenmp>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # The compiler collects its garbage from half a GiB on: before, that took a tenth of its time.
  target_compile_options(sbtrain_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=524288>)
endif()
target_include_directories(sbtrain_options INTERFACE ${CMAKE_SOURCE_DIR}/src ${CMAKE_BINARY_DIR}/include)
target_link_libraries(sbtrain_options INTERFACE fmt::fmt OpenMP::OpenMP_CXX Threads::Threads)
if(SBTRAIN_NATIVE)
  target_compile_options(sbtrain_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=native>)
elseif(SBTRAIN_CPU)
  target_compile_options(sbtrain_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-march=${SBTRAIN_CPU}>)
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
# the build with the sanitizers checks: it has no precompiled headers. nlohmann/json has one of its own: it leaves
# templates to instantiate in every file that reads it, 0.35 s each, and four of five files need none of them.
# sbtrain_precompile(name HEADERS ... LINK ... OPTIONS ...) makes the precompiled headers that REUSE_FROM names. Their
# options have to be those of the files that read them: GCC 12 crashed where only the level of -O differed.
function(sbtrain_precompile name)
  cmake_parse_arguments(ARG "" "" "HEADERS;LINK;OPTIONS" ${ARGN})
  add_library(${name} OBJECT ${PROJECT_SOURCE_DIR}/cmake/precompiled.cpp)
  target_link_libraries(${name} PUBLIC sbtrain_options ${ARG_LINK})
  target_compile_options(${name} PRIVATE ${ARG_OPTIONS})
  target_precompile_headers(${name} PRIVATE ${ARG_HEADERS})
endfunction()
set(common_headers <fmt/format.h> <fmt/ranges.h> <algorithm> <array> <chrono> <cmath> <cstdint> <filesystem> <fstream>
                   <functional> <map> <memory> <mutex> <optional> <random> <set> <span> <string> <string_view> <thread>
                   <utility> <variant> <vector>)
set(sbtrain_options_cold $<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-O1>)
sbtrain_precompile(sbtrain_precompiled HEADERS ${common_headers})
sbtrain_precompile(sbtrain_precompiled_cold HEADERS ${common_headers} OPTIONS ${sbtrain_options_cold})
sbtrain_precompile(sbtrain_precompiled_cold_json HEADERS ${common_headers} <nlohmann/json.hpp>
                   LINK nlohmann_json::nlohmann_json OPTIONS ${sbtrain_options_cold})

# A file costs what it includes and instantiates more than what it says, so up to `count` files of a target are compiled
# together, in half the time, and one of them that changes costs no more than those. Names in their unnamed namespaces
# must differ, or stand in a namespace of the file. A file with options or definitions of its own is compiled by itself,
# as is one with the property SKIP_UNITY_BUILD_INCLUSION, and each where headers are not precompiled.
function(sbtrain_compile_together target count)
  if(NOT CMAKE_DISABLE_PRECOMPILE_HEADERS)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${count})
  endif()
endfunction()

# sbtrain_library(name [COLD] [APART] SOURCES ... [JSON ...] LINK ...). A COLD library reads, prints and waits rather
# than computes: -O1 compiles it in a fifth less time. JSON are the sources that include nlohmann/json.hpp, and all of
# them are cold: one that is not stands among the others and reads that header itself. The files of a library that is
# APART are alike, and use the same names each for itself: they are not compiled together.
function(sbtrain_library name)
  cmake_parse_arguments(ARG "COLD;APART" "" "SOURCES;JSON;LINK" ${ARGN})
  set(speed "")
  if(ARG_COLD)
    set(speed _cold)
  endif()
  set(parts sbtrain_${name})
  add_library(sbtrain_${name} STATIC ${ARG_SOURCES})
  target_precompile_headers(sbtrain_${name} REUSE_FROM sbtrain_precompiled${speed})
  target_compile_options(sbtrain_${name} PRIVATE ${sbtrain_options${speed}})
  if(ARG_JSON)
    add_library(sbtrain_${name}_json OBJECT ${ARG_JSON})
    target_precompile_headers(sbtrain_${name}_json REUSE_FROM sbtrain_precompiled_cold_json)
    target_compile_options(sbtrain_${name}_json PRIVATE ${sbtrain_options_cold})
    target_include_directories(sbtrain_${name}_json PRIVATE $<TARGET_PROPERTY:sbtrain_${name},INCLUDE_DIRECTORIES>)
    target_sources(sbtrain_${name} PRIVATE $<TARGET_OBJECTS:sbtrain_${name}_json>)
    list(APPEND parts sbtrain_${name}_json)
  endif()
  foreach(part ${parts})
    target_link_libraries(${part} PUBLIC sbtrain_options ${ARG_LINK})
    if(NOT ARG_APART)
      sbtrain_compile_together(${part} 6)
    endif()
  endforeach()
endfunction()

# Test programs are linked by lld or gold, where there is one: GNU ld takes a second of processor time for each of some
# sixty, they a fifth and a half of it.
set(fast_linker)
if(SBTRAIN_TESTS AND NOT SBTRAIN_SANITIZE)
  include(CheckLinkerFlag)
  foreach(linker lld gold)
    check_linker_flag(CXX -fuse-ld=${linker} SBTRAIN_LINKS_WITH_${linker})
    if(SBTRAIN_LINKS_WITH_${linker} AND NOT fast_linker)
      set(fast_linker -fuse-ld=${linker})
    endif()
  endforeach()
endif()

# sbtrain_test(name [SERIAL] [WHOLE] [APART] [JSON | COMPUTES] LABELS ... SOURCES ... LINK ...) adds one GoogleTest
# program with one CTest entry per test, or with WHOLE one entry for all of them, which then share what they set up.
# With SERIAL no other test runs at the same time; with JSON most sources include nlohmann/json.hpp; with COMPUTES the
# tests run for longer than they compile (tests/CMakeLists.txt); with APART each file is compiled by itself.
function(sbtrain_test name)
  cmake_parse_arguments(ARG "SERIAL;WHOLE;APART;JSON;COMPUTES" "" "LABELS;SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE tests_process ${ARG_LINK} GTest::gtest_main)
  target_link_options(${name} PRIVATE ${fast_linker})
  if(ARG_JSON)
    target_link_libraries(${name} PRIVATE nlohmann_json::nlohmann_json)
    target_precompile_headers(${name} REUSE_FROM sbtrain_tests_precompiled_json)
  elseif(ARG_COMPUTES)
    target_compile_options(${name} PRIVATE ${computes_options})
    target_precompile_headers(${name} REUSE_FROM sbtrain_tests_precompiled_computes)
  else()
    target_precompile_headers(${name} REUSE_FROM sbtrain_tests_precompiled)
  endif()
  if(NOT ARG_APART)
    sbtrain_compile_together(${name} 4)
  endif()
  if(ARG_WHOLE)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 900 RUN_SERIAL ${ARG_SERIAL})
    return()
  endif()
  include(GoogleTest)
  gtest_discover_tests(${name} NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 900 RUN_SERIAL ${ARG_SERIAL})
endfunction()
