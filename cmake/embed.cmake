# Writes the bytes of a file as an array of a C++ header:
#   cmake -DINPUT=... -DOUTPUT=... -DNAME=kPageHtml -P embed.cmake
file(READ ${INPUT} bytes HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE ${OUTPUT} "#pragma once\n\nnamespace sbtrain {\n\n"
     "inline constexpr unsigned char ${NAME}[] = {${bytes}};\n\n}  // namespace sbtrain\n")
