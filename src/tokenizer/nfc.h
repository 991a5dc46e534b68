// Unicode's normalisation form C (Unicode Standard Annex 15), by utf8proc.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace sbtrain {

// A stretch of text that normalisation treats by itself: neither what precedes nor what follows it
// changes its result.
struct NfcSegment {
  size_t original = 0;    // where it starts in the text
  size_t normalized = 0;  // where it starts in the normalised text
  bool same = true;       // it is not changed, byte for byte
};

struct NfcText {
  std::string text;
  std::vector<NfcSegment> segments;  // in order; they cover the text
};

// Whether no character of `text` can change in normalisation, because all are below U+0300.
bool is_plain_nfc(std::string_view text);

// Normalises valid UTF-8 in time n log n of its length, whatever the order of its marks.
NfcText to_nfc(std::string_view text);

}  // namespace sbtrain
