/* One record of the log: where its parts are, and whether its lengths and CRCs agree.
 *
 * The bytes are hostile: each length is compared with what is left of the record before it is used, and the record with
 * what is left of its buffer. Layouts are those of format/layout.py. What is refused here, the scalar codec of
 * format/record.py refuses, too, and says why.
 */
#ifndef MESSAGESTORE_FRAME_H
#define MESSAGESTORE_FRAME_H

#include "kernel.h"

#define MAGIC_V1 0xDAA320A7u
#define MAGIC_V2 0xDAA320ABu
#define CRC_MASK 0x7FFFFFFFu

enum {
    HEAD_SIZE = 88, /* with IPv4 hosts */
    IPV6_EXTRA_SIZE = 12,
    PROPERTIES_LENGTH_SIZE = 2,
    MIN_RECORD_SIZE = HEAD_SIZE + 1 + PROPERTIES_LENGTH_SIZE,
    PROPERTY_CRC_SIZE = 20,
    PROPERTY_CRC_BEGIN_SIZE = 9,
    BORN_HOST_V6 = 0x10,
    STORE_HOST_V6 = 0x20,
};

/* The positions are relative to the record's first byte. */
typedef struct {
    int64_t queue_offset, physical_offset;
    int32_t size, queue_id, sys_flag;
    uint32_t body_crc;
    int32_t body, body_size, topic, topic_size, properties, properties_size;
} Frame;

/* By how many bytes the born host, and both hosts, move what is behind them. */
static inline int32_t born_extra(int32_t sys_flag) { return sys_flag & BORN_HOST_V6 ? IPV6_EXTRA_SIZE : 0; }
static inline int32_t hosts_extra(int32_t sys_flag) {
    return born_extra(sys_flag) + (sys_flag & STORE_HOST_V6 ? IPV6_EXTRA_SIZE : 0);
}

/* Whether a whole record begins at `p`, where `available` bytes are left of the buffer. CRCs are not compared. */
static inline bool frame_of(const uint8_t *p, int64_t available, Frame *f) {
    if (available < MIN_RECORD_SIZE) return false;
    f->size = (int32_t)big_u32(p);
    if (f->size < MIN_RECORD_SIZE || f->size > available) return false;
    uint32_t magic = big_u32(p + 4);
    if (magic != MAGIC_V1 && magic != MAGIC_V2) return false;
    f->body_crc = big_u32(p + 8);
    f->queue_id = (int32_t)big_u32(p + 12);
    f->queue_offset = (int64_t)big_u64(p + 20);
    f->physical_offset = (int64_t)big_u64(p + 28);
    f->sys_flag = (int32_t)big_u32(p + 36);
    f->body = HEAD_SIZE + hosts_extra(f->sys_flag);
    int32_t length_size = magic == MAGIC_V2 ? 2 : 1;
    int32_t left = f->size - f->body - length_size - PROPERTIES_LENGTH_SIZE; /* for body, topic and properties */
    if (left < 0) return false;
    f->body_size = (int32_t)big_u32(p + f->body - 4);
    if (f->body_size < 0 || f->body_size > left) return false;
    left -= f->body_size;
    const uint8_t *length = p + f->body + f->body_size;
    f->topic = f->body + f->body_size + length_size;
    f->topic_size = magic == MAGIC_V2 ? (int16_t)big_u16(length) : (int8_t)*length;
    if (f->topic_size < 0 || f->topic_size > left) return false;
    left -= f->topic_size;
    f->properties = f->topic + f->topic_size + PROPERTIES_LENGTH_SIZE;
    f->properties_size = (int16_t)big_u16(p + f->topic + f->topic_size);
    return f->properties_size == left;
}

/* Whether the ten digits at `found` are those of the CRC of a record's first bytes, with the separator behind them. */
static inline bool crc_digits_match(const uint8_t *p, int32_t covered, const uint8_t *found) {
    uint32_t crc = crc32_update(0, p, (size_t)covered) & CRC_MASK;
    for (int i = 0; i < 10; i++, crc /= 10) /* the last digit comes first */
        if (found[i] != '0' + crc % 10) return false;
    return found[10] == 0x02;
}

/* Whether the record ends in the value of `__CRC32#`, and most of the name before it is right, but not all: bits of the
 * name were flipped. A property of another name has that value by chance once in 2^31 times. */
static inline bool crc_name_is_damaged(const uint8_t *p, const Frame *f) {
    if (f->properties_size < PROPERTY_CRC_SIZE) return false;
    int32_t covered = f->size - PROPERTY_CRC_SIZE;
    int same = 0;
    for (int i = 0; i < PROPERTY_CRC_BEGIN_SIZE; i++) same += p[covered + i] == "__CRC32#\x01"[i];
    if (same == PROPERTY_CRC_BEGIN_SIZE || 2 * same < PROPERTY_CRC_BEGIN_SIZE) return false;
    return crc_digits_match(p, covered, p + covered + PROPERTY_CRC_BEGIN_SIZE);
}

/* Whether BODYCRC and, if the record ends in one, `__CRC32#` are those of its bytes. */
static inline bool crcs_match(const uint8_t *p, const Frame *f) {
    if (f->body_size && (crc32_update(0, p + f->body, (size_t)f->body_size) & CRC_MASK) != f->body_crc) return false;
    if (f->properties_size < PROPERTY_CRC_SIZE) return true;
    int32_t covered = f->size - PROPERTY_CRC_SIZE;
    const uint8_t *found = p + covered;
    if (memcmp(found, "__CRC32#\x01", PROPERTY_CRC_BEGIN_SIZE) != 0) return true;
    return crc_digits_match(p, covered, found + PROPERTY_CRC_BEGIN_SIZE);
}

#endif
