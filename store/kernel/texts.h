/* Texts and properties of a record, and its stamp: what encode.c (batches) and message.c (single puts) share. */
#ifndef MESSAGESTORE_TEXTS_H
#define MESSAGESTORE_TEXTS_H

#include "kernel.h"

enum { MAX_PROPERTIES_SIZE = 32767, CRC_SIZE = 20 };

static const char KEYS[] = "KEYS\x01", UNIQUE_KEY[] = "UNIQ_KEY\x01", TAGS[] = "TAGS\x01", WAIT_FALSE[] = "WAIT\x01" "false\x02";
static const char PROPERTY_CRC[] = "__CRC32#\x01" "0000000000\x02";

typedef struct {
    const uint8_t *at; /* NULL: null */
    int64_t size;
} Text;

static inline bool goes_on(const uint8_t **at, const uint8_t *end, int more, uint8_t low, uint8_t high) {
    for (; more; more--, low = 0x80, high = 0xBF)
        if (*at == end || **at < low || *(*at)++ > high) return false;
    return true;
}

/* Whether a text is UTF-8 without U+0001, U+0002 and, on request, without blanks. */
static inline bool text_is_legal(Text text, bool blanks) {
    const uint64_t ones = 0x0101010101010101u, tops = 0x8080808080808080u, sevens = 0x7F7F7F7F7F7F7F7Fu;
    const uint64_t third = blanks ? 2 * ones : 0x20 * ones;
    const uint8_t *at = text.at, *end = text.at + text.size;
    while (at < end) {
        if (end - at >= 8) {
            uint64_t word = native_u64(at);
            if (!(word & tops)) {
                uint64_t others = ((word ^ ones) + sevens) & ((word ^ 2 * ones) + sevens) & ((word ^ third) + sevens);
                if ((others & tops) != tops) return false;
                at += 8;
                continue;
            }
        }
        uint8_t lead = *at++;
        if (lead < 0x80) {
            if (lead == 1 || lead == 2 || (lead == 0x20 && !blanks)) return false;
        } else if (lead >= 0xC2 && lead <= 0xDF) {
            if (!goes_on(&at, end, 1, 0x80, 0xBF)) return false;
        } else if (lead >= 0xE0 && lead <= 0xEF) {
            if (!goes_on(&at, end, 2, lead == 0xE0 ? 0xA0 : 0x80, lead == 0xED ? 0x9F : 0xBF)) return false;
        } else if (lead >= 0xF0 && lead <= 0xF4) {
            if (!goes_on(&at, end, 3, lead == 0xF0 ? 0x90 : 0x80, lead == 0xF4 ? 0x8F : 0xBF)) return false;
        } else {
            return false;
        }
    }
    return true;
}

static inline bool same(Text a, Text b) { return a.size == b.size && !memcmp(a.at, b.at, (size_t)a.size); }

static inline uint8_t *append(uint8_t *at, const void *bytes, int64_t size) {
    memcpy(at, bytes, (size_t)size);
    return at + size;
}

/* ---- stamping */

enum { OFFSETS_POSITION = 20, MIN_RECORD_SIZE = 91, CRC_DIGITS = 10 };

static inline void put_crc_digits(uint8_t *at, uint32_t crc) { /* ten digits, the last one first */
    crc &= 0x7FFFFFFFu;
    for (int i = 0; i < CRC_DIGITS; i++, crc /= 10) at[i] = (uint8_t)('0' + crc % 10);
}

/* Write place and store time into a record of MIN_RECORD_SIZE bytes or more, and then its `__CRC32#` if it has one. */
static inline void stamp_one(uint8_t *record, int64_t size, int64_t queue_offset, int64_t physical_offset,
                             int64_t timestamp_ms, int64_t timestamp_position, bool property_crc) {
    put_big_64(record + OFFSETS_POSITION, (uint64_t)queue_offset);
    put_big_64(record + OFFSETS_POSITION + 8, (uint64_t)physical_offset);
    put_big_64(record + timestamp_position, (uint64_t)timestamp_ms);
    if (!property_crc) return;
    size -= CRC_SIZE;
    put_crc_digits(record + size + CRC_SIZE - 1 - CRC_DIGITS, crc32_update(0, record, (size_t)size));
}

#endif
