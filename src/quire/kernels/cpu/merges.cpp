// The merges of SentencePiece's BPE, which has scores of tokens instead: it joins the neighbours whose union has the best score.
//
// The reference, quire/text/score_merges.py, gives each pair of tokens whose union is a token, twice as many as can ever be used.
// When a union is made inside of a text, all merges inside of it were those of its own text alone: none crossed its ends, and the
// best pair of the whole text is the best of all inside. So its last merge is always the same. It is found here by BPE of each
// token's own text. Of a token with more than ``LONG`` characters all pairs are given.
//
// Tokens are looked up by hashes of their bytes and compared. Characters are those of UTF-8, which the caller has checked.
#include <cstdint>
#include <cstring>
#include <algorithm>
#include <new>
#include <vector>

namespace {

constexpr uint64_t FACTOR = 0x9e3779b97f4a7c15;
constexpr int LONG = 256;

struct Text {
    const uint8_t* bytes;
    int64_t size;
};

// The place of a union among the merges: of its best score first, then of its number, then of its cut.
struct Rank {
    int32_t order, cut;
    bool operator<(const Rank& other) const { return order != other.order ? order < other.order : cut < other.cut; }
};

// Memory is what a lookup waits for, so all about a short token stands in its slot.
struct Slot {
    uint64_t hash;
    uint64_t begin;  // The first eight bytes, or fewer and zeros.
    int32_t size, number;  // Of the first of equal tokens; -1: the slot is free.
    int32_t order = -1;    // Of a token that may be a union; -1 of another.
};

struct Vocabulary {
    std::vector<Text> tokens;
    std::vector<Slot> slots;  // By the upper bits of a hash.
    int shift;

    explicit Vocabulary(int64_t count) : tokens(count) {
        int bits = 2;
        while ((int64_t)1 << bits < 2 * count) bits++;
        slots.assign((size_t)1 << bits, {0, 0, 0, -1});
        shift = 64 - bits;
    }

    static uint64_t word(const uint8_t* bytes, int64_t size) {
        uint64_t found = 0;
        if (size >= 8) memcpy(&found, bytes, 8);
        else for (int64_t i = size; i--;) found = found << 8 | bytes[i];
        return found;
    }

    // Return the slot of a text: that of the same token, or a free one, made ready for it.
    Slot& slot(Text text) {
        uint64_t begin = word(text.bytes, text.size), hash = (begin ^ text.size) * FACTOR;
        for (int64_t at = 8; at < text.size; at += 8) hash = ((hash ^ hash >> 32) + word(text.bytes + at, text.size - at)) * FACTOR;
        hash = (hash ^ hash >> 32) * FACTOR;
        for (size_t place = hash >> shift;; place = (place + 1) & (slots.size() - 1)) {
            Slot& found = slots[place];
            if (found.number < 0) {
                found.hash = hash, found.begin = begin, found.size = (int32_t)text.size;
                return found;
            }
            if (found.hash == hash && found.begin == begin && found.size == text.size &&
                (text.size <= 8 || !memcmp(tokens[found.number].bytes, text.bytes, text.size)))
                return found;
        }
    }
};

int64_t character_bytes(uint8_t first) { return first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4; }

struct Part {
    Text text;
    Rank rank;  // Of its union with the next one; NONE without such a token.
};

constexpr Rank NONE = {INT32_MAX, 0};

// Return the rank of the union of two neighbours.
Rank rank_of(Vocabulary& known, Text left, Text right) {
    const Slot& found = known.slot({left.bytes, left.size + right.size});
    return found.number < 0 || found.order < 0 ? NONE : Rank{found.order, (int32_t)left.size};
}

// Split a token into characters; false if one of them is no token, so that no merge makes this token.
bool split(Vocabulary& known, Text token, std::vector<Part>& parts) {
    parts.clear();
    for (int64_t at = 0; at < token.size;) {
        int64_t size = character_bytes(token.bytes[at]);
        parts.push_back({{token.bytes + at, size}, NONE});
        if (known.slot(parts.back().text).number < 0) return false;
        at += size;
    }
    return true;
}

// Return the bytes of the left half of a token's last merge; 0 without one.
int64_t last_cut(Vocabulary& known, std::vector<Part>& parts) {
    for (size_t i = 0; i + 1 < parts.size(); i++) parts[i].rank = rank_of(known, parts[i].text, parts[i + 1].text);
    while (parts.size() > 2) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < parts.size(); i++)
            if (parts[i].rank < parts[best].rank) best = i;
        if (parts[best].rank.order == NONE.order) return 0;
        parts[best].text.size += parts[best + 1].text.size;
        parts.erase(parts.begin() + best + 1);
        parts[best].rank = best + 1 < parts.size() ? rank_of(known, parts[best].text, parts[best + 1].text) : NONE;
        if (best) parts[best - 1].rank = rank_of(known, parts[best - 1].text, parts[best].text);
    }
    return parts.size() == 2 && parts[0].rank.order != NONE.order ? parts[0].text.size : 0;
}

}  // namespace

// Write the numbers of the left and right tokens of each merge, in their order, and return the number of merges; -1: no memory
// for them, or more than ``room``. ``bytes``: all tokens in UTF-8; ``characters``: their numbers; ``union_order``: the numbers of
// the tokens that may be unions, by score.
extern "C" int64_t quire_merges(
    int64_t* pairs, int64_t room, const uint8_t* bytes, const int64_t* characters, int64_t count, const int32_t* union_order, int64_t unions
) try {
    Vocabulary known(count);
    for (int64_t i = 0; i < count; i++) {
        int64_t size = 0;
        for (int64_t k = 0; k < characters[i]; k++) size += character_bytes(bytes[size]);
        known.tokens[i] = {bytes, size};
        bytes += size;
        Slot& slot = known.slot(known.tokens[i]);
        if (slot.number < 0) slot.number = (int32_t)i;
    }
    // Of equal tokens the last one by score counts, as the reference's later entry for a pair does.
    for (int64_t i = 0; i < unions; i++) known.slot(known.tokens[union_order[i]]).order = (int32_t)i;
    int64_t found = 0;
    std::vector<Part> parts;
    for (int64_t i = 0; i < unions; i++) {
        Text token = known.tokens[union_order[i]];
        if (known.slot(token).order != i || !split(known, token, parts)) continue;
        auto write = [&](int64_t cut) {
            int32_t left = known.slot({token.bytes, cut}).number, right = known.slot({token.bytes + cut, token.size - cut}).number;
            if (left < 0 || right < 0) return true;
            if (found == room) return false;
            pairs[2 * found] = left;
            pairs[2 * found++ + 1] = right;
            return true;
        };
        if (parts.size() <= LONG) {
            int64_t cut = last_cut(known, parts);
            if (cut && !write(cut)) return -1;
        } else {
            for (size_t k = 1; k < parts.size(); k++)
                if (!write(parts[k].text.bytes - token.bytes)) return -1;
        }
    }
    return found;
} catch (const std::bad_alloc&) {
    return -1;
}
