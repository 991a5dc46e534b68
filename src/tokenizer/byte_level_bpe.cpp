#include "tokenizer/byte_level_bpe.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/utf8.h"
#include "tokenizer/nfc.h"

namespace sbtrain {
namespace {

std::string normal_content(const BpeDescription& description, const AddedToken& token) {
  return token.normalized && description.nfc ? to_nfc(token.content).text : token.content;
}

// The added tokens that are looked for before or after normalisation.
AddedTokens search_for(const BpeDescription& description, bool normalized, bool special) {
  std::vector<AddedToken> tokens;
  for (AddedToken token : description.added) {
    if (token.normalized != normalized) continue;
    token.content = normal_content(description, token);
    tokens.push_back(std::move(token));
  }
  return {std::move(tokens), special};
}

Vocabulary vocabulary_of(const BpeDescription& description) {
  Vocabulary vocabulary;
  vocabulary.bytes = description.bytes;
  for (const AddedToken& token : description.added) {
    const auto id = static_cast<size_t>(token.id);
    if (id >= vocabulary.bytes.size()) vocabulary.bytes.resize(id + 1);
    vocabulary.bytes[id] = token.special ? "" : normal_content(description, token);
    if (token.special) vocabulary.special.emplace(token.content, token.id);
  }
  vocabulary.bos = description.bos;
  vocabulary.eos = description.eos;
  vocabulary.unk = description.unk;
  vocabulary.adds_bos = description.adds_bos;
  const bool strips = std::any_of(
      description.added.begin(), description.added.end(),
      [](const AddedToken& token) { return !token.special && (token.lstrip || token.rstrip); });
  if (description.nfc) {
    vocabulary.flaw = "normalises text (NFC)";
  } else if (strips) {
    vocabulary.flaw = "drops the spaces beside some added tokens";
  }
  return vocabulary;
}

}  // namespace

class ByteLevelBpe::Borrowed {
 public:
  explicit Borrowed(const ByteLevelBpe& owner) : owner_(owner) {
    {
      const std::lock_guard lock(owner.mutex_);
      if (!owner.free_.empty()) {
        scratch_ = std::move(owner.free_.back());
        owner.free_.pop_back();
      }
    }
    if (!scratch_) scratch_ = std::make_unique<Scratch>();
  }
  ~Borrowed() {
    const std::lock_guard lock(owner_.mutex_);
    owner_.free_.push_back(std::move(scratch_));
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;
  Scratch& operator*() { return *scratch_; }

 private:
  const ByteLevelBpe& owner_;
  std::unique_ptr<Scratch> scratch_;
};

ByteLevelBpe::ByteLevelBpe(BpeDescription description, bool special)
    : vocabulary_(vocabulary_of(description)),
      byte_ids_(description.pairs.byte_ids),
      pairs_(std::move(description.pairs)),
      raw_added_(search_for(description, /*normalized=*/false, special)),
      normalized_added_(search_for(description, /*normalized=*/true, special)),
      pre_tokenizer_(std::move(description.stages)),
      nfc_(description.nfc) {
  if (vocabulary_.flaw.empty() && !pre_tokenizer_.keeps_text()) {
    vocabulary_.flaw = "leaves out text that its regular expression does not match";
  }
}

void ByteLevelBpe::encode(std::string_view text, std::vector<int32_t>& ids,
                          bool /*continues*/) const {
  Borrowed scratch(*this);
  visit_pieces(text, /*open=*/false, *scratch, [&](int32_t id, std::string_view piece, End) {
    if (id >= 0) {
      ids.push_back(id);
    } else {
      pairs_.encode(piece, ids, (*scratch).pairs);
    }
  });
}

// One text on its way through the stages.
class ByteLevelBpe::Walk {
 public:
  Walk(const ByteLevelBpe& model, std::string_view text, bool open, Scratch& scratch,
       const Visit& visit)
      : model_(model), text_(text), open_(open), scratch_(scratch), visit_(visit) {}

  void run() {
    for (size_t at = 0; at < text_.size();) {
      const size_t valid = valid_length(text_.substr(at));
      if (valid > 0) {
        split_raw(text_.substr(at, valid));
        at += valid;
      } else {
        const auto byte = static_cast<uint8_t>(text_[at]);
        visit_(model_.byte_ids_[byte], {}, {++at, ++normalized_});
      }
    }
  }

 private:
  size_t end_of(std::string_view part) const {
    return static_cast<size_t>(part.data() + part.size() - text_.data());
  }

  void split_raw(std::string_view run) {
    model_.raw_added_.split(run, [&](int32_t id, std::string_view part) {
      if (id >= 0) {
        normalized_ += part.size();
        visit_(id, {}, {end_of(part), normalized_});
      } else if (model_.nfc_ && !is_plain_nfc(part)) {
        normalize(part);
      } else {
        segments_ = {{0, 0, true}};
        split_normalized(part, part, part.size());
      }
    });
  }

  void normalize(std::string_view part) {
    NfcText normal = to_nfc(part);
    segments_ = std::move(normal.segments);
    // What follows an open text may combine with the end of its last stretch.
    const NfcSegment last = segments_.back();
    const size_t settled = last.same ? normal.text.size() - 1 : last.normalized;
    const bool open = open_ && end_of(part) == text_.size();
    split_normalized(part, normal.text, open ? settled : normal.text.size());
  }

  // `settled`: bytes of the normalised text that cannot change.
  void split_normalized(std::string_view part, std::string_view normal, size_t settled) {
    const size_t start = end_of(part) - part.size();
    const bool open = open_ && end_of(part) == text_.size();
    const auto end = [&](std::string_view piece) -> End {
      const auto place = static_cast<size_t>(piece.data() + piece.size() - normal.data());
      const size_t original = place <= settled ? place_in_text(place, part, normal) : kNowhere;
      return {original == kNowhere ? kNowhere : start + original, normalized_ + place};
    };
    model_.normalized_added_.split(normal, [&](int32_t id, std::string_view fragment) {
      if (id >= 0) return visit_(id, {}, end(fragment));
      const bool last = fragment.data() + fragment.size() == normal.data() + normal.size();
      model_.pre_tokenizer_.split(fragment, open && last, scratch_.match,
                                  [&](std::string_view piece) { visit_(-1, piece, end(piece)); });
    });
    normalized_ += normal.size();
  }

  size_t place_in_text(size_t place, std::string_view part, std::string_view normal) const {
    if (place == normal.size()) return part.size();
    const auto after = std::upper_bound(
        segments_.begin(), segments_.end(), place,
        [](size_t value, const NfcSegment& segment) { return value < segment.normalized; });
    const NfcSegment& segment = *(after - 1);
    if (!segment.same && place != segment.normalized) return kNowhere;
    return segment.original + place - segment.normalized;
  }

  const ByteLevelBpe& model_;
  std::string_view text_;
  bool open_;
  Scratch& scratch_;
  const Visit& visit_;
  std::vector<NfcSegment> segments_;  // of the part that is being split
  size_t normalized_ = 0;             // bytes of the normalised text before that part
};

void ByteLevelBpe::visit_pieces(std::string_view text, bool open, Scratch& scratch,
                                const Visit& visit) const {
  scratch.match.begin_text(text.size());
  Walk(*this, text, open, scratch, visit).run();
}

// ---- Cutting a long text -------------------------------------------------------------------

std::vector<ByteLevelBpe::End> ByteLevelBpe::ends(std::string_view text, bool open) const {
  Borrowed scratch(*this);
  std::vector<End> result;
  visit_pieces(text, open, *scratch,
               [&](int32_t, std::string_view, End end) { result.push_back(end); });
  return result;
}

TextChunk ByteLevelBpe::first_chunk(std::string_view text) const {
  if (text.size() <= kChunkBytes) return {text.size(), true};
  const size_t whole = character_boundary(text, kChunkBytes);
  if (!pre_tokenizer_.forgets() || raw_added_.looks_around() || normalized_added_.looks_around() ||
      (nfc_ && !normalized_added_.empty())) {
    return {whole, false};
  }
  const auto divides_token = [&](size_t cut) {
    return raw_added_.divides(text, cut) || normalized_added_.divides(text, cut);
  };
  // Added tokens that begin in the window are seen whole.
  size_t window = whole - std::min(whole, std::max(raw_added_.longest_bytes(),
                                                   normalized_added_.longest_bytes()));
  window = character_boundary(text, window);
  while (window > 0 && divides_token(window)) window = character_boundary(text, window - 1);
  // The text after the end of a piece is encoded as if nothing stood before it. The text before it
  // is too if its pieces are the same when it ends there, which a few ends are tried for.
  constexpr int kTries = 8;
  const std::vector<End> all = ends(text.substr(0, window), /*open=*/true);
  int tries = 0;
  for (size_t i = all.size(); i > 0 && tries < kTries; --i) {
    const size_t cut = all[i - 1].text;
    if (cut == kNowhere || cut == window || divides_token(cut)) continue;
    ++tries;
    const std::vector<End> before = ends(text.substr(0, cut), /*open=*/false);
    if (before.size() == i && std::equal(before.begin(), before.end(), all.begin())) {
      return {cut, true};
    }
  }
  return {whole, false};
}

}  // namespace sbtrain
