/* Records to the buffers of Arrow columns, in three steps: `frame` checks n records and notes where their parts are,
 * `measure` reads their texts and properties and says how large the columns are, and the functions after them fill
 * buffers of that size, one column at a time.
 *
 * Between the steps the notes (Row, Text) are in buffers of the caller. They are not trusted: each place is compared
 * with the data again, and each value with what is left of the output, so that bytes that change in between (a mapped
 * file) give wrong values at worst. A fault is not explained here: the scalar codec does that.
 */
#include "frame.h"

/* A record. `topic` and `properties` are places in the data, and `body` is relative to the record's start. */
typedef struct {
    int64_t start, topic, properties;
    int32_t body, body_size, topic_size, properties_size, sys_flag;
    int32_t state;
} Row;

/* The state of a row's texts. The caller rewrites the texts of an unclean row to clean ones. */
enum { CLEAN = 0, UNCLEAN = 1, REWRITTEN = 2 };

/* The frequent properties of a row: places relative to its properties; a size of -1 means that there is none. */
typedef struct {
    int32_t tags, tags_size, unique_key, unique_key_size, keys, keys_size;
    int32_t counts[2]; /* how many properties are the user's own, and how many have names of RocketMQ's */
} Text;

typedef struct {
    const uint8_t *bytes;
    int64_t size;
} Data;

static inline Data data_of(const Py_buffer *buffer) { return (Data){buffer->buf, buffer->len}; }

/* A sum that may overflow: the notes may hold anything. */
static inline int64_t plus(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }

static inline bool inside(Data data, int64_t at, int64_t size) {
    return at >= 0 && size >= 0 && size <= data.size && at <= data.size - size;
}

/* The array of n notes in a buffer; NULL with an exception if the buffer has another size or is not aligned. */
static void *notes(const Py_buffer *buffer, Py_ssize_t n, Py_ssize_t width, const char *name) {
    static int64_t nothing;
    if (!holds(buffer, n, width, name)) return NULL;
    if (n == 0) return &nothing; /* an empty buffer may have no address */
    if ((uintptr_t)buffer->buf % 8 == 0) return buffer->buf;
    PyErr_Format(PyExc_ValueError, "%s: found a buffer at an odd address; allowed are multiples of 8", name);
    return NULL;
}

static void release(Py_buffer *buffers, int count) {
    for (int i = 0; i < count; i++) PyBuffer_Release(&buffers[i]);
}

/* ---- frame */

/* What units promise of their records; without units, all is NULL. */
typedef struct {
    const uint8_t *topic, *queue_offsets, *physical_offsets, *renumbered;
    int64_t topic_size, queue_id;
} Promised;

static inline bool is_promised(const uint8_t *p, const Frame *f, const Promised *promised, Py_ssize_t row) {
    return f->physical_offset == native_i64(promised->physical_offsets + 8 * row) &&
           f->queue_id == promised->queue_id && f->topic_size == promised->topic_size &&
           memcmp(p + f->topic, promised->topic, (size_t)f->topic_size) == 0 &&
           (f->queue_offset == native_i64(promised->queue_offsets + 8 * row) ||
            (promised->renumbered != NULL && promised->renumbered[row]));
}

/* frame(data, starts, sizes, rows, verify, topic, queue_id, queue_offsets, physical_offsets, renumbered)
 * -> (rows that are good, up to the first that is not; the bytes of their bodies; the bytes of their topics) */
PyObject *kernel_frame(PyObject *module, PyObject *arguments) {
    (void)module;
    enum { DATA, STARTS, SIZES, ROWS, TOPIC, QUEUE_OFFSETS, PHYSICAL_OFFSETS, RENUMBERED, COUNT };
    Py_buffer b[COUNT];
    int verify;
    long long queue_id;
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*py*Ly*y*y*", &b[DATA], &b[STARTS], &b[SIZES], &b[ROWS], &verify,
                          &b[TOPIC], &queue_id, &b[QUEUE_OFFSETS], &b[PHYSICAL_OFFSETS], &b[RENUMBERED]))
        return NULL;
    Py_ssize_t n = item_count(&b[STARTS], 8, "starts"), good = 0;
    Row *rows = n < 0 ? NULL : notes(&b[ROWS], n, sizeof(Row), "rows");
    bool promises = b[PHYSICAL_OFFSETS].len > 0;
    PyObject *found = NULL;
    if (rows == NULL || !holds(&b[SIZES], n, 4, "sizes") ||
        (promises && (!holds(&b[PHYSICAL_OFFSETS], n, 8, "physical_offsets") ||
                      !holds(&b[QUEUE_OFFSETS], n, 8, "queue_offsets") ||
                      (b[RENUMBERED].len > 0 && !holds(&b[RENUMBERED], n, 1, "renumbered")))))
        goto done;
    int64_t body_bytes = 0, topic_bytes = 0;
    Py_BEGIN_ALLOW_THREADS
    Data data = data_of(&b[DATA]);
    const uint8_t *starts = b[STARTS].buf, *sizes = b[SIZES].buf;
    Promised promised = {b[TOPIC].buf, b[QUEUE_OFFSETS].buf, b[PHYSICAL_OFFSETS].buf,
                         b[RENUMBERED].len > 0 ? b[RENUMBERED].buf : NULL,
                         b[TOPIC].len, queue_id};
    for (; good < n; good++) {
        int64_t start = native_i64(starts + 8 * good);
        int32_t size = native_i32(sizes + 4 * good);
        Frame f;
        if (!inside(data, start, size)) break;
        const uint8_t *p = data.bytes + start;
        if (!frame_of(p, size, &f) || f.size != size) break;
        if (promises && !is_promised(p, &f, &promised, good)) break;
        if (verify && (!crcs_match(p, &f) || crc_name_is_damaged(p, &f))) break;
        rows[good] = (Row){start,       start + f.topic,   start + f.properties, f.body, f.body_size, f.topic_size,
                           f.properties_size, f.sys_flag, CLEAN};
        body_bytes += f.body_size;
        topic_bytes += f.topic_size;
    }
    Py_END_ALLOW_THREADS
    found = Py_BuildValue("nLL", good, (long long)body_bytes, (long long)topic_bytes);
done:
    release(b, COUNT);
    return found;
}

/* ---- texts */

static bool is_utf8(const uint8_t *at, const uint8_t *end) {
    while (at < end) {
        uint8_t lead = *at++;
        if (lead < 0x80) continue;
        int more = lead < 0xE0 ? 1 : lead < 0xF0 ? 2 : 3;
        uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80; /* what the second byte may be */
        uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        if (lead < 0xC2 || lead > 0xF4 || end - at < more || *at < low || *at > high) return false;
        for (at++; --more; at++)
            if ((*at & 0xC0) != 0x80) return false;
    }
    return true;
}

#define EACH_BYTE(value) (0x0101010101010101u * (value))

/* The next bytes of a text, at most eight, and zeros behind them. `left` > 0 bytes are left of the text, and the data
 * end at `limit`. */
static inline uint64_t next_word(const uint8_t *at, int64_t left, const uint8_t *limit) {
    if (left >= 8) return native_u64(at);
    if (limit - at >= 8) return native_u64(at) & (((uint64_t)1 << 8 * left) - 1);
    uint64_t word = 0;
    memcpy(&word, at, (size_t)left);
    return word;
}

/* The high bit of each byte that is 0x01 or 0x02. */
static inline uint64_t separators(uint64_t word) {
    uint64_t plus = ((word & EACH_BYTE(0x7F)) + EACH_BYTE(0x01)) | (word & EACH_BYTE(0x80)); /* 2 or 3: a separator */
    uint64_t other = (plus ^ EACH_BYTE(0x02)) & EACH_BYTE(0xFE);                              /* 0: a separator */
    return ~(((other & EACH_BYTE(0x7F)) + EACH_BYTE(0x7F)) | other) & EACH_BYTE(0x80);
}

static bool is_clean_utf8(const uint8_t *text, int64_t size, const uint8_t *limit) {
    uint64_t all = 0;
    for (int64_t at = 0; at < size; at += 8) all |= next_word(text + at, size - at, limit);
    return (all & EACH_BYTE(0x80)) == 0 || is_utf8(text, text + size);
}

/* ---- properties */

enum { MOST_PROPERTIES = 32 };

/* A name and a value, as places in the property string; neither is empty. `word` is the name's first eight bytes. */
typedef struct {
    uint64_t word;
    int32_t name, name_size, value, value_size;
} Property;

/* Reads a property string as Java does: parts end with 0x02 or with the text, and the first 0x01 of a part ends its
 * name. A part without a name or with an empty value does not count. */
typedef struct {
    const uint8_t *text, *limit;
    int64_t size, at;
    int32_t part, name_end;
    uint64_t all; /* every byte that was read, by "or" */
} Reader;

static inline Reader reader_of(Data data, const Row *row) {
    return (Reader){data.bytes + row->properties, data.bytes + data.size, row->properties_size, 0, 0, -1, 0};
}

static inline int taken(const Reader *r, Property *to, int32_t end) {
    if (r->name_end <= r->part || end <= r->name_end + 1) return 0;
    int32_t size = r->name_end - r->part;
    *to = (Property){next_word(r->text + r->part, size, r->limit), r->part, size, r->name_end + 1,
                     end - r->name_end - 1};
    return 1;
}

/* The next properties, at most MOST_PROPERTIES; fewer only at the end of the text. */
static inline int read_properties(Reader *r, Property *found) {
    int count = 0;
    while (r->at < r->size) {
        uint64_t word = next_word(r->text + r->at, r->size - r->at, r->limit);
        r->all |= word;
        for (uint64_t marks = separators(word); marks; marks &= marks - 1) {
            int32_t at = (int32_t)(r->at + (__builtin_ctzll(marks) >> 3));
            if (r->text[at] == 0x01) {
                if (r->name_end < 0) r->name_end = at;
                continue;
            }
            count += taken(r, found + count, at);
            r->part = at + 1;
            r->name_end = -1;
            if (count == MOST_PROPERTIES) {
                r->at = at + 1;
                return count;
            }
        }
        r->at += 8;
    }
    if (r->part < r->size) { /* the last 0x02 may be missing */
        count += taken(r, found + count, (int32_t)r->size);
        r->part = (int32_t)r->size;
    }
    return count;
}

/* RocketMQ's own names, found by a hash of their size and first bytes. */
enum { MOST_RESERVED = 200, SLOTS = 256 };
typedef struct {
    const uint8_t *names[MOST_RESERVED];
    uint64_t words[MOST_RESERVED];
    int32_t sizes[MOST_RESERVED];
    uint8_t next[MOST_RESERVED], slots[SLOTS]; /* a number plus one; 0: none */
} Reserved;

static inline uint32_t slot_of(uint64_t word, int32_t size) {
    return (uint32_t)((word * 0x9E3779B97F4A7C15u) >> 56) ^ (uint32_t)(size & 0xFF);
}

/* `text` has the names, each with 0x02 behind it. */
static bool read_reserved(Reserved *to, const Py_buffer *text) {
    memset(to->slots, 0, sizeof to->slots);
    const uint8_t *at = text->buf, *limit = at + text->len;
    for (int count = 0; at < limit; count++) {
        const uint8_t *end = memchr(at, 0x02, (size_t)(limit - at));
        if (end == NULL || end == at || count == MOST_RESERVED) {
            PyErr_SetString(PyExc_ValueError, "reserved: allowed are up to 200 names, each with 0x02 behind it");
            return false;
        }
        to->names[count] = at;
        to->sizes[count] = (int32_t)(end - at);
        to->words[count] = next_word(at, end - at, limit);
        uint32_t slot = slot_of(to->words[count], to->sizes[count]) % SLOTS;
        to->next[count] = to->slots[slot];
        to->slots[slot] = (uint8_t)(count + 1);
        at = end + 1;
    }
    return true;
}

static inline bool is_reserved(const Reserved *reserved, const uint8_t *text, const Property *p) {
    for (int i = reserved->slots[slot_of(p->word, p->name_size) % SLOTS]; i; i = reserved->next[i - 1])
        if (reserved->words[i - 1] == p->word && reserved->sizes[i - 1] == p->name_size &&
            (p->name_size <= 8 || memcmp(reserved->names[i - 1], text + p->name, (size_t)p->name_size) == 0))
            return true;
    return false;
}

static bool has_twice(const uint8_t *text, const Property *found, int count) {
    for (int i = 1; i < count; i++)
        for (int j = 0; j < i; j++)
            if (found[i].word == found[j].word && found[i].name_size == found[j].name_size &&
                (found[i].name_size <= 8 ||
                 memcmp(text + found[i].name, text + found[j].name, (size_t)found[i].name_size) == 0))
                return true;
    return false;
}

/* ---- measure */

/* What the caller wants to know, and the items of `totals`. */
enum { WANT_TOPIC = 1, WANT_PROPERTIES = 2, WANT_MAPS = 4 };
enum {
    TAGS_BYTES, TAGS_COUNT, UNIQUE_KEY_BYTES, UNIQUE_KEY_COUNT, KEY_BYTES, KEY_COUNT,
    USER_COUNT, USER_NAME_BYTES, USER_VALUE_BYTES, RESERVED_COUNT, RESERVED_NAME_BYTES, RESERVED_VALUE_BYTES,
    TOPIC_BYTES, MESSAGE_ID_BYTES, OFFSET_ID_BYTES, TOTAL_COUNT
};

#define WORD_KEYS 0x5359454Bu              /* "KEYS" */
#define WORD_TAGS 0x53474154u              /* "TAGS" */
#define WORD_UNIQ_KEY 0x59454B5F51494E55u  /* "UNIQ_KEY" */

static inline int32_t offset_id_size(const Row *row) { return row->sys_flag & STORE_HOST_V6 ? 56 : 32; }

/* Whether the properties of a row are clean; `text` and `totals` are changed if they are. */
static inline bool measure_row(Data data, const Row *row, Text *text, const Reserved *reserved, bool maps,
                               int64_t *totals) {
    Property found[MOST_PROPERTIES];
    Reader r = reader_of(data, row);
    Text t = {0, -1, 0, -1, 0, -1, {0, 0}};
    int64_t sums[2][2] = {{0, 0}, {0, 0}};
    int count;
    do {
        count = read_properties(&r, found);
        for (int i = 0; i < count; i++) {
            const Property *p = &found[i];
            bool own = false;
            if (p->name_size == 4 && p->word == WORD_KEYS) {
                t.keys = p->value, t.keys_size = p->value_size, own = true;
            } else if (p->name_size == 4 && p->word == WORD_TAGS) {
                t.tags = p->value, t.tags_size = p->value_size, own = true;
            } else if (p->name_size == 8 && p->word == WORD_UNIQ_KEY) {
                t.unique_key = p->value, t.unique_key_size = p->value_size, own = true;
            }
            if (!maps) continue;
            int kind = own || is_reserved(reserved, r.text, p);
            t.counts[kind]++;
            sums[kind][0] += p->name_size;
            sums[kind][1] += p->value_size;
        }
        if (maps && row->state != REWRITTEN && (count == MOST_PROPERTIES || has_twice(r.text, found, count)))
            return false;
    } while (count == MOST_PROPERTIES);
    if ((r.all & EACH_BYTE(0x80)) && !is_utf8(r.text, r.text + r.size)) return false;
    *text = t;
    if (t.tags_size >= 0) totals[TAGS_COUNT]++, totals[TAGS_BYTES] += t.tags_size;
    if (t.unique_key_size >= 0) totals[UNIQUE_KEY_COUNT]++, totals[UNIQUE_KEY_BYTES] += t.unique_key_size;
    for (int kind = 0; kind < 2; kind++) {
        totals[USER_COUNT + 3 * kind] += t.counts[kind];
        totals[USER_NAME_BYTES + 3 * kind] += sums[kind][0];
        totals[USER_VALUE_BYTES + 3 * kind] += sums[kind][1];
    }
    bool within = false;
    for (int32_t i = 0; i < t.keys_size; i++) {
        bool blank = r.text[t.keys + i] == ' ';
        totals[KEY_COUNT] += !blank && !within;
        totals[KEY_BYTES] += !blank;
        within = !blank;
    }
    return true;
}

/* measure(data, rows, texts, reserved, wanted, totals) -> how many rows are not clean; the sums of `totals` hold if
 * none is */
PyObject *kernel_measure(PyObject *module, PyObject *arguments) {
    (void)module;
    enum { DATA, ROWS, TEXTS, RESERVED, TOTALS, COUNT };
    Py_buffer b[COUNT];
    int wanted;
    if (!PyArg_ParseTuple(arguments, "y*w*w*y*iw*", &b[DATA], &b[ROWS], &b[TEXTS], &b[RESERVED], &wanted, &b[TOTALS]))
        return NULL;
    Py_ssize_t n = item_count(&b[ROWS], sizeof(Row), "rows"), unclean = 0;
    Row *rows = n < 0 ? NULL : notes(&b[ROWS], n, sizeof(Row), "rows");
    Text *texts = rows == NULL ? NULL : notes(&b[TEXTS], n, sizeof(Text), "texts");
    Reserved reserved;
    bool good = texts != NULL && holds(&b[TOTALS], TOTAL_COUNT, 8, "totals") && read_reserved(&reserved, &b[RESERVED]);
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        Data data = data_of(&b[DATA]);
        int64_t totals[TOTAL_COUNT] = {0};
        for (Py_ssize_t i = 0; i < n; i++) {
            Row *row = &rows[i];
            bool clean = inside(data, row->topic, row->topic_size) &&
                         inside(data, row->properties, row->properties_size);
            if (clean && wanted & WANT_TOPIC)
                clean = is_clean_utf8(data.bytes + row->topic, row->topic_size, data.bytes + data.size);
            texts[i] = (Text){0, -1, 0, -1, 0, -1, {0, 0}};
            if (clean && wanted & WANT_PROPERTIES)
                clean = measure_row(data, row, &texts[i], &reserved, (wanted & WANT_MAPS) != 0, totals);
            totals[TOPIC_BYTES] += row->topic_size;
            totals[OFFSET_ID_BYTES] += offset_id_size(row);
            totals[MESSAGE_ID_BYTES] += texts[i].unique_key_size >= 0 ? texts[i].unique_key_size : offset_id_size(row);
            if (clean) continue;
            row->state = UNCLEAN;
            unclean++;
        }
        memcpy(b[TOTALS].buf, totals, sizeof totals);
        Py_END_ALLOW_THREADS
    }
    release(b, COUNT);
    return good ? PyLong_FromSsize_t(unclean) : NULL;
}

/* ---- fill */

/* Values one behind another, with their ends in an offsets buffer of Arrow (int32[n+1]). */
typedef struct {
    uint8_t *ends, *bytes;
    int64_t count, at, most_count, size;
} Output;

static inline Output output_of(const Py_buffer *offsets, const Py_buffer *bytes) {
    Output out = {offsets->buf, bytes->buf, 0, 0, offsets->len / 4 - 1, bytes->len < INT32_MAX ? bytes->len : INT32_MAX};
    if (out.most_count >= 0) put_native_32(out.ends, 0);
    return out;
}

static inline void copied(uint8_t *to, const uint8_t *from, int64_t size) {
    if (size > 16) {
        memcpy(to, from, (size_t)size);
    } else if (size >= 8) {
        uint64_t first = native_u64(from), last = native_u64(from + size - 8);
        put_native_64(to, first);
        put_native_64(to + size - 8, last);
    } else if (size >= 4) {
        uint32_t first = (uint32_t)native_i32(from), last = (uint32_t)native_i32(from + size - 4);
        put_native_32(to, first);
        put_native_32(to + size - 4, last);
    } else {
        for (int64_t i = 0; i < size; i++) to[i] = from[i];
    }
}

/* The room for the next value; NULL if it is not there. */
static inline uint8_t *room(Output *out, int64_t size) {
    if (size < 0 || size > out->size - out->at || out->count >= out->most_count) return NULL;
    uint8_t *to = out->bytes + out->at;
    out->at += size;
    put_native_32(out->ends + 4 * ++out->count, (uint32_t)out->at);
    return to;
}

static inline bool put(Output *out, const uint8_t *from, int64_t size) {
    uint8_t *to = room(out, size);
    if (to == NULL) return false;
    copied(to, from, size);
    return true;
}

static inline bool is_full(const Output *out) { return out->count == out->most_count && out->at == out->size; }

static const char DIGITS[] = "0123456789ABCDEF";

static inline bool put_offset_id(Output *out, Data data, const Row *row) {
    int32_t host_size = offset_id_size(row) / 2 - 8;
    int64_t host = plus(row->start, 64 + born_extra(row->sys_flag));
    if (!inside(data, row->start, HEAD_SIZE) || !inside(data, host, host_size)) return false;
    uint8_t *to = room(out, offset_id_size(row));
    if (to == NULL) return false;
    for (int i = 0; i < host_size + 8; i++) {
        uint8_t byte = data.bytes[i < host_size ? host + i : row->start + 28 + i - host_size];
        *to++ = (uint8_t)DIGITS[byte >> 4];
        *to++ = (uint8_t)DIGITS[byte & 0x0F];
    }
    return true;
}

enum { BODY, TOPIC_TEXT, OFFSET_ID, BORN_HOST, STORE_HOST, TAGS, UNIQUE_KEY, MESSAGE_ID };

static inline bool put_value(Output *out, Data data, const Row *row, const Text *text, int which) {
    int64_t at, size;
    switch (which) {
    case BODY: at = plus(row->start, row->body), size = row->body_size; break;
    case TOPIC_TEXT: at = row->topic, size = row->topic_size; break;
    case TAGS: at = plus(row->properties, text->tags), size = text->tags_size; break;
    case UNIQUE_KEY: at = plus(row->properties, text->unique_key), size = text->unique_key_size; break;
    case MESSAGE_ID:
        if (text->unique_key_size < 0) return put_offset_id(out, data, row);
        at = plus(row->properties, text->unique_key), size = text->unique_key_size;
        break;
    case OFFSET_ID: return put_offset_id(out, data, row);
    case BORN_HOST: at = plus(row->start, 48), size = row->sys_flag & BORN_HOST_V6 ? 20 : 8; break;
    default:
        at = plus(row->start, 64 + born_extra(row->sys_flag)), size = row->sys_flag & STORE_HOST_V6 ? 20 : 8;
    }
    if (size < 0) return put(out, data.bytes, 0); /* null */
    return inside(data, at, size) && put(out, data.bytes + at, size);
}

#define VALUES_OF(which)                                                                                         \
    case which:                                                                                                  \
        for (; done < n && put_value(&out, data, &rows[done], texts + (which >= TAGS ? done : 0), which); done++) \
            ;                                                                                                    \
        break;

static PyObject *filled(bool good, bool full) {
    if (good && !full) PyErr_SetString(PyExc_ValueError, "the notes do not fit the data or the buffers to be filled");
    if (!good || !full) return NULL;
    Py_RETURN_NONE;
}

/* fill_values(data, rows, texts, which, offsets, bytes, valid): `valid` is a bitmap of zeros, or empty */
PyObject *kernel_fill_values(PyObject *module, PyObject *arguments) {
    (void)module;
    enum { DATA, ROWS, TEXTS, OFFSETS, BYTES, VALID, COUNT };
    Py_buffer b[COUNT];
    int which;
    if (!PyArg_ParseTuple(arguments, "y*y*y*iw*w*w*", &b[DATA], &b[ROWS], &b[TEXTS], &which, &b[OFFSETS], &b[BYTES],
                          &b[VALID]))
        return NULL;
    Py_ssize_t n = item_count(&b[ROWS], sizeof(Row), "rows"), done = 0;
    bool of_properties = which >= TAGS && which <= MESSAGE_ID, full = false;
    const Row *rows = n < 0 ? NULL : notes(&b[ROWS], n, sizeof(Row), "rows");
    const Text *texts = rows == NULL ? NULL : notes(&b[TEXTS], of_properties ? n : 0, sizeof(Text), "texts");
    bool good = texts != NULL && holds(&b[OFFSETS], n + 1, 4, "offsets") &&
                (b[VALID].len == 0 || (of_properties && holds(&b[VALID], (n + 7) / 8, 1, "valid")));
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        Data data = data_of(&b[DATA]);
        Output out = output_of(&b[OFFSETS], &b[BYTES]);
        switch (which) {
            VALUES_OF(BODY)
            VALUES_OF(TOPIC_TEXT)
            VALUES_OF(TAGS)
            VALUES_OF(UNIQUE_KEY)
            VALUES_OF(MESSAGE_ID)
            VALUES_OF(OFFSET_ID)
            VALUES_OF(BORN_HOST)
            VALUES_OF(STORE_HOST)
        }
        full = done == n && is_full(&out);
        uint8_t *valid = b[VALID].buf;
        for (Py_ssize_t i = 0; full && b[VALID].len && i < n; i++)
            if ((which == TAGS ? texts[i].tags_size : texts[i].unique_key_size) >= 0)
                valid[i / 8] |= (uint8_t)(1 << i % 8);
        Py_END_ALLOW_THREADS
    }
    release(b, COUNT);
    return filled(good, full);
}

static inline bool put_keys(Output *out, Data data, const Row *row, const Text *text) {
    if (text->keys_size < 0) return true;
    int64_t at = plus(row->properties, text->keys);
    if (!inside(data, at, text->keys_size)) return false;
    const uint8_t *key = data.bytes + at, *end = key + text->keys_size;
    for (const uint8_t *p = key;; p++) {
        if (p < end && *p != ' ') continue;
        if (p > key && !put(out, key, p - key)) return false;
        if (p >= end) return true;
        key = p + 1;
    }
}

/* fill_keys(data, rows, texts, list_offsets, offsets, bytes) */
PyObject *kernel_fill_keys(PyObject *module, PyObject *arguments) {
    (void)module;
    enum { DATA, ROWS, TEXTS, LISTS, OFFSETS, BYTES, COUNT };
    Py_buffer b[COUNT];
    if (!PyArg_ParseTuple(arguments, "y*y*y*w*w*w*", &b[DATA], &b[ROWS], &b[TEXTS], &b[LISTS], &b[OFFSETS], &b[BYTES]))
        return NULL;
    Py_ssize_t n = item_count(&b[ROWS], sizeof(Row), "rows"), done = 0;
    const Row *rows = n < 0 ? NULL : notes(&b[ROWS], n, sizeof(Row), "rows");
    const Text *texts = rows == NULL ? NULL : notes(&b[TEXTS], n, sizeof(Text), "texts");
    bool good = texts != NULL && holds(&b[LISTS], n + 1, 4, "lists"), full = false;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        Data data = data_of(&b[DATA]);
        Output out = output_of(&b[OFFSETS], &b[BYTES]);
        uint8_t *lists = b[LISTS].buf;
        put_native_32(lists, 0);
        for (; done < n && put_keys(&out, data, &rows[done], &texts[done]); done++)
            put_native_32(lists + 4 * (done + 1), (uint32_t)out.count);
        full = done == n && is_full(&out);
        Py_END_ALLOW_THREADS
    }
    release(b, COUNT);
    return filled(good, full);
}

static bool put_map(Output *names, Output *values, Data data, const Row *row, const Reserved *reserved, int kind) {
    Property found[MOST_PROPERTIES];
    if (!inside(data, row->properties, row->properties_size)) return false;
    Reader r = reader_of(data, row);
    int count;
    do {
        count = read_properties(&r, found);
        for (int i = 0; i < count; i++)
            if (is_reserved(reserved, r.text, &found[i]) == kind &&
                (!put(names, r.text + found[i].name, found[i].name_size) ||
                 !put(values, r.text + found[i].value, found[i].value_size)))
                return false;
    } while (count == MOST_PROPERTIES);
    return true;
}

/* fill_map(data, rows, texts, reserved, kind, map_offsets, name_offsets, names, value_offsets, values): `kind` is 0
 * for the user's own properties and 1 for RocketMQ's */
PyObject *kernel_fill_map(PyObject *module, PyObject *arguments) {
    (void)module;
    enum { DATA, ROWS, TEXTS, RESERVED, MAPS, NAME_OFFSETS, NAMES, VALUE_OFFSETS, VALUES, COUNT };
    Py_buffer b[COUNT];
    int kind;
    if (!PyArg_ParseTuple(arguments, "y*y*y*y*pw*w*w*w*w*", &b[DATA], &b[ROWS], &b[TEXTS], &b[RESERVED], &kind,
                          &b[MAPS], &b[NAME_OFFSETS], &b[NAMES], &b[VALUE_OFFSETS], &b[VALUES]))
        return NULL;
    Py_ssize_t n = item_count(&b[ROWS], sizeof(Row), "rows"), done = 0;
    const Row *rows = n < 0 ? NULL : notes(&b[ROWS], n, sizeof(Row), "rows");
    const Text *texts = rows == NULL ? NULL : notes(&b[TEXTS], n, sizeof(Text), "texts");
    Reserved reserved;
    bool good = texts != NULL && holds(&b[MAPS], n + 1, 4, "maps") && read_reserved(&reserved, &b[RESERVED]);
    bool full = false;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        Data data = data_of(&b[DATA]);
        Output names = output_of(&b[NAME_OFFSETS], &b[NAMES]), values = output_of(&b[VALUE_OFFSETS], &b[VALUES]);
        uint8_t *maps = b[MAPS].buf;
        put_native_32(maps, 0);
        for (; done < n; done++) {
            if (texts[done].counts[kind] && !put_map(&names, &values, data, &rows[done], &reserved, kind)) break;
            put_native_32(maps + 4 * (done + 1), (uint32_t)names.count);
        }
        full = done == n && is_full(&names) && is_full(&values);
        Py_END_ALLOW_THREADS
    }
    release(b, COUNT);
    return filled(good, full);
}

/* fill_numbers(data, rows, position, behind, width, out): one field of the heads. `behind` says what lies before it:
 * 1 the born host, 2 both hosts. */
PyObject *kernel_fill_numbers(PyObject *module, PyObject *arguments) {
    (void)module;
    enum { DATA, ROWS, OUT, COUNT };
    Py_buffer b[COUNT];
    int position, behind, width;
    if (!PyArg_ParseTuple(arguments, "y*y*iiiw*", &b[DATA], &b[ROWS], &position, &behind, &width, &b[OUT])) return NULL;
    Py_ssize_t n = item_count(&b[ROWS], sizeof(Row), "rows"), done = 0;
    const Row *rows = n < 0 ? NULL : notes(&b[ROWS], n, sizeof(Row), "rows");
    bool good = rows != NULL && (width == 4 || width == 8) && holds(&b[OUT], n, width, "out");
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        Data data = data_of(&b[DATA]);
        uint8_t *out = b[OUT].buf;
        for (; done < n; done++) {
            int32_t flags = rows[done].sys_flag;
            int extra = behind == 0 ? 0 : behind == 1 ? born_extra(flags) : hosts_extra(flags);
            int64_t at = plus(rows[done].start, (int64_t)position + extra);
            if (!inside(data, at, width)) break;
            if (width == 4)
                put_native_32(out + 4 * done, big_u32(data.bytes + at));
            else
                put_native_64(out + 8 * done, big_u64(data.bytes + at));
        }
        Py_END_ALLOW_THREADS
    } else if (rows != NULL && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "width: found %d; allowed are 4 and 8", width);
    }
    release(b, COUNT);
    return filled(good, done == n);
}
