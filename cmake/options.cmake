# Compiler options that every target of the project shares, and the helper that adds a library.
add_library(sbtrain_options INTERFACE)
target_compile_options(sbtrain_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -fno-math-errno -fno-trapping-math -fopenmp>)
target_compile_definitions(sbtrain_options INTERFACE SBTRAIN_HAS_CUDA=$<BOOL:${SBTRAIN_HAS_CUDA}>)
target_include_directories(sbtrain_options INTERFACE ${CMAKE_SOURCE_DIR}/src)
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

# sbtrain_library(name SOURCES ... LINK ...)
function(sbtrain_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(sbtrain_${name} STATIC ${ARG_SOURCES})
  target_link_libraries(sbtrain_${name} PUBLIC sbtrain_options ${ARG_LINK})
endfunction()

# sbtrain_test(name LABELS ... [SERIAL] SOURCES ... LINK ...) adds one GoogleTest program with one CTest
# entry per test. With SERIAL no other test runs at the same time.
function(sbtrain_test name)
  cmake_parse_arguments(ARG "SERIAL" "" "LABELS;SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE sbtrain_options ${ARG_LINK} GTest::gtest GTest::gtest_main)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  include(GoogleTest)
  gtest_discover_tests(${name} NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
                       PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT 900 RUN_SERIAL ${ARG_SERIAL})
endfunction()
