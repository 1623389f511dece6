/* Columns of Arrow to records, grouped by queue: the batch side of MessageExtEncoder.java.
 *
 *     head | body | TOPICLEN topic | PROPLEN | KEYS.. UNIQ_KEY.. TAGS.. the user's.. [__CRC32#..]
 *
 * `encode_size` adds up the sizes, which needs the offsets of the columns only. `encode` then checks each text, writes
 * each record and computes what goes with it. Nothing is trusted in between: `encode` measures each record again before
 * it writes it. Both stop at a row that cannot be stored and say only that there is one; Python then looks for the first
 * one and explains it (message_checks.py).
 */
#include "texts.h"

enum { GOOD, BAD_ROW, DAMAGED, TOO_SMALL };

enum { MAX_QUEUE_ID = 65535, MAX_FIELDS = 8, KNOWN_NAMES = 16 };
enum { BODY_FIELD = 0, KEYS_FIELD = 2, TAGS_FIELD = 3, PROPERTIES_FIELD = 4 }; /* their numbers in the digest */

/* ---- columns */

/* An array of Arrow: texts or bytes with `limit` bytes of data, or lists with `limit` items in their child. */
typedef struct {
    Py_buffer data, offsets, valid;
    int64_t first, count, limit;
    bool there, large;
} Column;

static void drop_column(Column *column) {
    if (!column->there) return;
    PyBuffer_Release(&column->data);
    PyBuffer_Release(&column->offsets);
    PyBuffer_Release(&column->valid);
}

/* From None, or (data, offsets, valid or None, first, count, large); for lists, `data` is None and `limit` follows. */
static bool take_column(PyObject *from, Column *column, const char *name) {
    long long first, count, limit = -1;
    int large;
    if (from == Py_None) return true;
    if (!PyTuple_Check(from)) {
        PyErr_Format(PyExc_TypeError, "%s: a column is None or a tuple", name);
        return false;
    }
    if (!PyArg_ParseTuple(from, "z*z*z*LLp|L", &column->data, &column->offsets, &column->valid, &first, &count, &large,
                          &limit))
        return false;
    column->there = true;
    column->first = first;
    column->count = count;
    column->large = large;
    column->limit = limit >= 0 ? limit : column->data.len;
    int64_t width = large ? 8 : 4, offsets = column->offsets.len / width, bits = (int64_t)column->valid.len;
    bool fits = first >= 0 && count >= 0;
    if (fits && count) fits = offsets >= 1 && first <= offsets - 1 && count <= offsets - 1 - first;
    if (fits && count && column->valid.buf != NULL) fits = first / 8 < bits && count <= bits * 8 - first;
    if (!fits) PyErr_Format(PyExc_ValueError, "%s: %lld rows from %lld on are outside its buffers", name, count, first);
    return fits;
}

/* Where item i of a column is; a null is empty. False: the offsets lead outside. 0 <= i < count is the caller's duty. */
static inline bool range_of(const Column *column, int64_t i, int64_t *start, int64_t *end, bool *null) {
    i += column->first;
    *null = column->valid.buf != NULL && !(((const uint8_t *)column->valid.buf)[i >> 3] >> (i & 7) & 1);
    if (*null) {
        *start = *end = 0;
        return true;
    }
    const uint8_t *offsets = column->offsets.buf;
    *start = column->large ? native_i64(offsets + 8 * i) : native_i32(offsets + 4 * i);
    *end = column->large ? native_i64(offsets + 8 * i + 8) : native_i32(offsets + 4 * i + 4);
    return 0 <= *start && *start <= *end && *end <= column->limit;
}

static inline bool text_of(const Column *column, int64_t i, Text *text) {
    int64_t start, end;
    bool null;
    if (!range_of(column, i, &start, &end, &null)) return false;
    text->size = end - start;
    text->at = null ? NULL : column->data.buf == NULL ? (const uint8_t *)"" : (const uint8_t *)column->data.buf + start;
    return true;
}

/* ---- the arguments */

typedef struct {
    long number;
    Py_buffer values, present; /* uint64[n], and bool[n] or nothing */
} Field;

typedef struct {
    Field fields[MAX_FIELDS];
    int count;
    bool wanted;
} Fields;

typedef struct {
    int64_t n;
    Column body, key_lists, keys, unique_key, tags, pair_lists, names, values;
    Py_buffer head, queue_ids, flags, times;
    Py_buffer topic_codes, topic_bytes, topic_ends, topic_magics, topic_hashes; /* codes: nothing if all are 0 */
    Py_buffer reserved, reserved_ends;
    Py_buffer stamps; /* the properties behind the user's, the same in each record */
    Fields digest; /* besides body, keys, tags and properties */
    int64_t topic_count, reserved_count, max_body_size;
    bool property_crc;
} Batch;

static void drop_batch(Batch *b) {
    Column *columns[] = {&b->body, &b->key_lists, &b->keys, &b->unique_key, &b->tags, &b->pair_lists, &b->names, &b->values};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) drop_column(columns[i]);
    Py_buffer *buffers[] = {&b->head,       &b->queue_ids,    &b->flags,        &b->times,    &b->topic_codes,  &b->topic_bytes,
                            &b->topic_ends, &b->topic_magics, &b->topic_hashes, &b->reserved, &b->reserved_ends,
                            &b->stamps};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) PyBuffer_Release(buffers[i]);
    for (int i = 0; i < b->digest.count; i++) {
        PyBuffer_Release(&b->digest.fields[i].values);
        PyBuffer_Release(&b->digest.fields[i].present);
    }
}

/* Whether ends of int64 begin at 0 or above, never go back, and stay within `size`. */
static bool ends_fit(const Py_buffer *ends, int64_t count, int64_t size, const char *name) {
    int64_t before = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t end = native_i64((const uint8_t *)ends->buf + 8 * i);
        if (end < before || end > size) {
            PyErr_Format(PyExc_ValueError, "%s: item %lld ends outside the bytes", name, (long long)i);
            return false;
        }
        before = end;
    }
    return true;
}

/* From None, which leaves the digest out, or a tuple of (number, values, present). */
static bool take_fields(PyObject *from, Fields *f, int64_t n) {
    if (from == Py_None) return true;
    f->wanted = true;
    Py_ssize_t count = PyTuple_Check(from) ? PyTuple_Size(from) : -1;
    if (count < 0 || count > MAX_FIELDS) {
        PyErr_SetString(PyExc_ValueError, "fields: allowed is None, or a tuple of up to 8");
        return false;
    }
    long before = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Field *field = &f->fields[i];
        PyObject *parts = PyTuple_GetItem(from, i);
        if (!PyTuple_Check(parts)) {
            PyErr_SetString(PyExc_TypeError, "fields: each is a tuple");
            return false;
        }
        if (!PyArg_ParseTuple(parts, "ly*z*", &field->number, &field->values, &field->present))
            return false;
        f->count++;
        if (field->number <= before) {
            PyErr_SetString(PyExc_ValueError, "fields: their numbers must grow");
            return false;
        }
        before = field->number;
        if (!holds(&field->values, n, 8, "fields") ||
            (field->present.buf != NULL && !holds(&field->present, n, 1, "fields")))
            return false;
    }
    return true;
}

static bool optional(const Py_buffer *buffer, int64_t count, Py_ssize_t width, const char *name) {
    return buffer->buf == NULL || holds(buffer, count, width, name);
}

/* Take the arguments and compare every size with its buffer. On failure, an exception is set; `drop_batch` is due. */
static bool take_batch(PyObject *from, Batch *b) {
    PyObject *body, *key_lists, *keys, *unique_key, *tags, *pair_lists, *names, *values, *digest;
    long long n, max_body_size;
    int property_crc;
    memset(b, 0, sizeof *b);
    if (!PyArg_ParseTuple(from, "LOOOOOOOOy*y*z*z*z*y*y*y*y*y*y*Oy*Lp", &n, &body, &key_lists, &keys, &unique_key, &tags,
                          &pair_lists, &names, &values, &b->head, &b->queue_ids, &b->flags, &b->times, &b->topic_codes,
                          &b->topic_bytes, &b->topic_ends, &b->topic_magics, &b->topic_hashes, &b->reserved,
                          &b->reserved_ends, &digest, &b->stamps, &max_body_size, &property_crc))
        return false;
    b->n = n;
    b->max_body_size = max_body_size;
    b->property_crc = property_crc;
    if (!take_column(body, &b->body, "body") || !take_column(key_lists, &b->key_lists, "keys") ||
        !take_column(keys, &b->keys, "keys") || !take_column(unique_key, &b->unique_key, "unique_key") ||
        !take_column(tags, &b->tags, "tags") || !take_column(pair_lists, &b->pair_lists, "properties") ||
        !take_column(names, &b->names, "properties") || !take_column(values, &b->values, "properties"))
        return false;
    const Column *of_rows[] = {&b->body, b->key_lists.there ? &b->key_lists : &b->keys, &b->unique_key, &b->tags, &b->pair_lists};
    for (size_t i = 0; i < sizeof of_rows / sizeof *of_rows; i++)
        if (of_rows[i]->there ? of_rows[i]->count != n : i == 0) {
            PyErr_SetString(PyExc_ValueError, "columns: they do not all have n rows");
            return false;
        }
    if ((b->key_lists.there && (!b->keys.there || b->key_lists.limit > b->keys.count)) ||
        (b->pair_lists.there && (!b->names.there || !b->values.there || b->pair_lists.limit > b->names.count ||
                                 b->pair_lists.limit > b->values.count))) {
        PyErr_SetString(PyExc_ValueError, "lists: their child has fewer items than they were said to have");
        return false;
    }
    if (b->head.len < 88 || b->head.len > 112 || n < 0 || max_body_size < 0 || max_body_size > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "head: allowed are 88 to 112 bytes; sizes are at most 2147483647");
        return false;
    }
    if (b->stamps.len > MAX_PROPERTIES_SIZE) {
        PyErr_SetString(PyExc_ValueError, "stamps: allowed are 32767 bytes");
        return false;
    }
    b->topic_count = item_count(&b->topic_ends, 8, "topic_ends");
    b->reserved_count = item_count(&b->reserved_ends, 8, "reserved_ends");
    return b->topic_count >= 0 && b->reserved_count >= 0 && holds(&b->topic_magics, b->topic_count, 4, "topic_magics") &&
           holds(&b->topic_hashes, b->topic_count, 4, "topic_hashes") &&
           ends_fit(&b->topic_ends, b->topic_count, b->topic_bytes.len, "topics") &&
           ends_fit(&b->reserved_ends, b->reserved_count, b->reserved.len, "reserved") &&
           holds(&b->queue_ids, n, 4, "queue_ids") && optional(&b->flags, n, 4, "flags") &&
           optional(&b->times, n, 8, "times") && optional(&b->topic_codes, n, 8, "topic_codes") &&
           take_fields(digest, &b->digest, n);
}

/* ---- one row */

typedef struct {
    Text body, topic, unique_key, tags;
    int64_t topic_code, first_key, last_key, first_pair, last_pair; /* positions in the columns of items */
    int64_t properties_size, size;
    int32_t key_count;
} Row;

static Text item_before(const Py_buffer *bytes, const Py_buffer *ends, int64_t i) {
    int64_t start = i ? native_i64((const uint8_t *)ends->buf + 8 * i - 8) : 0;
    Text text = {(const uint8_t *)bytes->buf + start, native_i64((const uint8_t *)ends->buf + 8 * i) - start};
    return text;
}

static int measure_items(const Column *lists, const Column *items, int64_t row, int64_t *first, int64_t *last) {
    bool null;
    *first = *last = 0;
    if (lists->there) return range_of(lists, row, first, last, &null) ? GOOD : DAMAGED;
    if (!items->there) return GOOD;
    if (!range_of(items, row, first, last, &null)) return DAMAGED; /* one item per row that is not null */
    *first = row;
    *last = null ? row : row + 1;
    return GOOD;
}

/* Sizes and places of the parts of a row. A part that is null, empty or too large where it may not be is BAD_ROW. */
static int measure(const Batch *b, int64_t row, Row *r) {
    static const Column none;
    int code;
    Text text;
    if (!text_of(&b->body, row, &r->body)) return DAMAGED;
    if (r->body.at == NULL || r->body.size > b->max_body_size) return BAD_ROW;
    int64_t topic = b->topic_codes.buf == NULL ? 0 : native_i64((const uint8_t *)b->topic_codes.buf + 8 * row);
    if (topic < 0 || topic >= b->topic_count) return BAD_ROW;
    r->topic_code = topic;
    r->topic = item_before(&b->topic_bytes, &b->topic_ends, topic);
    if (!r->topic.size) return BAD_ROW; /* a name that may not be stored was left out */
    int64_t size = (b->property_crc ? CRC_SIZE : 0) + b->stamps.len;
    if ((code = measure_items(&b->key_lists, &b->keys, row, &r->first_key, &r->last_key)) != GOOD) return code;
    for (int64_t i = r->first_key; i < r->last_key; i++) {
        if (!text_of(&b->keys, i, &text)) return DAMAGED;
        size += text.size + 1; /* the blank behind it, or the separator */
        if (!text.size || size > MAX_PROPERTIES_SIZE) return BAD_ROW;
    }
    r->key_count = (int32_t)(r->last_key - r->first_key);
    if (r->key_count) size += (int64_t)sizeof KEYS - 1;
    r->unique_key.at = r->tags.at = NULL;
    if (b->unique_key.there) {
        if (!text_of(&b->unique_key, row, &r->unique_key)) return DAMAGED;
        if (r->unique_key.at != NULL) {
            if (!r->unique_key.size || r->unique_key.size > MAX_PROPERTIES_SIZE) return BAD_ROW;
            size += (int64_t)sizeof UNIQUE_KEY - 1 + r->unique_key.size + 1;
            r->key_count++;
        }
    }
    if (b->tags.there) {
        if (!text_of(&b->tags, row, &r->tags)) return DAMAGED;
        if (r->tags.at != NULL) {
            if (!r->tags.size || r->tags.size > MAX_PROPERTIES_SIZE) return BAD_ROW;
            size += (int64_t)sizeof TAGS - 1 + r->tags.size + 1;
        }
    }
    if (measure_items(&b->pair_lists, &none, row, &r->first_pair, &r->last_pair) != GOOD) return DAMAGED;
    for (int64_t i = r->first_pair; i < r->last_pair; i++) {
        Text value;
        if (!text_of(&b->names, i, &text) || !text_of(&b->values, i, &value)) return DAMAGED;
        size += text.size + value.size + 2;
        if (!text.size || !value.size || size > MAX_PROPERTIES_SIZE) return BAD_ROW;
    }
    if (size > MAX_PROPERTIES_SIZE) return BAD_ROW;
    r->properties_size = size;
    r->size = b->head.len + r->body.size + r->topic.size + 2 + size;
    return r->size <= INT32_MAX ? GOOD : BAD_ROW;
}

/* ---- the names of properties: mostly those of the row before */

typedef struct {
    Text names[KNOWN_NAMES]; /* of the row before: legal, and all different */
    int64_t count;
} Names;

static bool name_is_legal(const Batch *b, Text name) {
    if (!text_is_legal(name, true)) return false;
    for (int64_t i = 0; i < b->reserved_count; i++)
        if (same(name, item_before(&b->reserved, &b->reserved_ends, i))) return false;
    return true;
}

/* Whether a row has a name twice. Its items were measured: there are less than 16384 of them. */
static bool name_is_twice(const Batch *b, const Row *r) {
    enum { PLACES = 1 << 15 };
    int32_t table[PLACES]; /* number of the item plus 1; 0: free */
    memset(table, 0, sizeof table);
    for (int64_t i = r->first_pair; i < r->last_pair; i++) {
        Text name, other;
        if (!text_of(&b->names, i, &name)) return true;
        uint32_t place = java_hash(0, name.at, (size_t)name.size) * 0x9E3779B1u >> 17;
        for (; table[place]; place = (place + 1) % PLACES) {
            if (!text_of(&b->names, r->first_pair + table[place] - 1, &other) || same(name, other)) return true;
        }
        table[place] = (int32_t)(i - r->first_pair) + 1;
    }
    return false;
}

/* Check the names of a row, and remember the first ones. */
static bool names_are_legal(const Batch *b, const Row *r, Names *known) {
    int64_t count = r->last_pair - r->first_pair;
    bool changed = count > known->count;
    for (int64_t k = 0; k < count; k++) {
        Text name;
        if (!text_of(&b->names, r->first_pair + k, &name)) return false;
        if (k < known->count && same(name, known->names[k])) continue;
        changed = true;
        if (!name_is_legal(b, name)) return false;
        if (k >= KNOWN_NAMES) continue;
        known->names[k] = name;
    }
    if (!changed) return true;
    known->count = count < KNOWN_NAMES ? count : KNOWN_NAMES;
    if (count > KNOWN_NAMES) return !name_is_twice(b, r);
    for (int64_t i = 1; i < count; i++)
        for (int64_t k = 0; k < i; k++)
            if (same(known->names[i], known->names[k])) return false;
    return true;
}

/* ---- the digest (row_digest.py): each field that is there is an item, of its number and its hash */

typedef struct {
    uint8_t bytes[16 * (MAX_FIELDS + 4)];
    size_t size;
    int next; /* of the fields that Python has hashed */
} Items;

static inline void add_item(Items *items, uint64_t number, uint64_t value) {
    put_native_64(items->bytes + items->size, number);
    put_native_64(items->bytes + items->size + 8, value);
    items->size += 16;
}

static inline bool is_present(const Field *field, int64_t row) {
    return field->present.buf == NULL || ((const uint8_t *)field->present.buf)[row];
}

static inline void add_fields(const Fields *f, int64_t row, Items *items, long below) {
    for (; items->next < f->count && f->fields[items->next].number < below; items->next++) {
        const Field *field = &f->fields[items->next];
        if (is_present(field, row))
            add_item(items, (uint64_t)field->number, native_u64((const uint8_t *)field->values.buf + 8 * row));
    }
}

/* ---- encoding */

typedef struct {
    uint8_t *data, *starts, *tags_codes, *key_hashes, *key_counts;
    int64_t size, key_hash_count; /* the room there is */
    uint64_t hash_sum;
} Output;

static int encode_row(const Batch *b, int64_t row, Output *out, int64_t *position, int64_t *key_position, Names *known,
                      int64_t place) {
    Row r;
    Text text;
    Items items;
    int code = measure(b, row, &r);
    if (code != GOOD) return code;
    items.size = 0;
    items.next = 0;
    if (r.size > out->size - *position || r.key_count > out->key_hash_count - *key_position) return TOO_SMALL;
    int32_t queue_id = native_i32((const uint8_t *)b->queue_ids.buf + 4 * row);
    if (queue_id < 0 || queue_id > MAX_QUEUE_ID) return BAD_ROW;

    uint8_t *record = out->data + *position, *at = record;
    uint8_t *key_hashes = out->key_hashes + 4 * *key_position;
    at = append(at, b->head.buf, b->head.len);
    put_big_32(record, (uint32_t)r.size);
    put_big_32(record + 4, (uint32_t)native_i32((const uint8_t *)b->topic_magics.buf + 4 * r.topic_code));
    put_big_32(record + 12, (uint32_t)queue_id);
    if (b->flags.buf != NULL) put_big_32(record + 16, (uint32_t)native_i32((const uint8_t *)b->flags.buf + 4 * row));
    if (b->times.buf != NULL) put_big_64(record + 40, (uint64_t)native_i64((const uint8_t *)b->times.buf + 8 * row));
    put_big_32(at - 4, (uint32_t)r.body.size);
    uint32_t crc = crc32_update(0, r.body.at, (size_t)r.body.size);
    put_big_32(record + 8, crc & 0x7FFFFFFFu);
    at = append(at, r.body.at, r.body.size);
    at = append(at, r.topic.at, r.topic.size);
    put_big_16(at, (uint16_t)r.properties_size);
    at += 2;

    uint32_t topic_hash = (uint32_t)native_i32((const uint8_t *)b->topic_hashes.buf + 4 * r.topic_code);
    if (b->digest.wanted) {
        add_item(&items, BODY_FIELD, xxh3(r.body.at, (size_t)r.body.size));
        add_fields(&b->digest, row, &items, KEYS_FIELD);
    }
    if (r.unique_key.at != NULL) { /* its hash comes before those of the keys, and its property behind theirs */
        if (!text_is_legal(r.unique_key, false)) return BAD_ROW;
        put_native_32(key_hashes, index_hash(java_hash(topic_hash, r.unique_key.at, (size_t)r.unique_key.size)));
        key_hashes += 4;
    }
    if (r.last_key > r.first_key) {
        at = append(at, KEYS, sizeof KEYS - 1);
        const uint8_t *joined = at;
        for (int64_t i = r.first_key; i < r.last_key; i++) {
            if (!text_of(&b->keys, i, &text)) return DAMAGED;
            if (!text_is_legal(text, false)) return BAD_ROW;
            if (i > r.first_key) *at++ = ' ';
            at = append(at, text.at, text.size);
            put_native_32(key_hashes, index_hash(java_hash(topic_hash, text.at, (size_t)text.size)));
            key_hashes += 4;
        }
        if (b->digest.wanted) add_item(&items, KEYS_FIELD, xxh3(joined, (size_t)(at - joined)));
        *at++ = 2;
    }
    if (r.unique_key.at != NULL) {
        at = append(at, UNIQUE_KEY, sizeof UNIQUE_KEY - 1);
        at = append(at, r.unique_key.at, r.unique_key.size);
        *at++ = 2;
    }
    int32_t tags_code = 0;
    if (r.tags.at != NULL) {
        if (!text_is_legal(r.tags, true)) return BAD_ROW;
        at = append(at, TAGS, sizeof TAGS - 1);
        at = append(at, r.tags.at, r.tags.size);
        *at++ = 2;
        tags_code = (int32_t)java_hash(0, r.tags.at, (size_t)r.tags.size);
        if (b->digest.wanted) add_item(&items, TAGS_FIELD, xxh3(r.tags.at, (size_t)r.tags.size));
    }
    if (r.last_pair > r.first_pair) {
        uint64_t sum = 0;
        if (!names_are_legal(b, &r, known)) return BAD_ROW;
        for (int64_t i = r.first_pair; i < r.last_pair; i++) {
            Text value;
            if (!text_of(&b->names, i, &text) || !text_of(&b->values, i, &value)) return DAMAGED;
            if (!text_is_legal(value, true)) return BAD_ROW;
            const uint8_t *pair = at;
            at = append(at, text.at, text.size);
            *at++ = 1;
            at = append(at, value.at, value.size);
            if (b->digest.wanted) sum += xxh3(pair, (size_t)(at - pair)); /* no name is there twice */
            *at++ = 2;
        }
        if (b->digest.wanted) add_item(&items, PROPERTIES_FIELD, sum);
    }
    at = append(at, b->stamps.buf, b->stamps.len);
    if (b->property_crc) append(at, PROPERTY_CRC, CRC_SIZE);
    if (b->digest.wanted) {
        add_fields(&b->digest, row, &items, 1 << 30);
        out->hash_sum += xxh3(items.bytes, items.size);
    }
    put_native_64(out->starts + 8 * place, (uint64_t)*position);
    put_native_64(out->tags_codes + 8 * place, (uint64_t)(int64_t)tags_code);
    put_native_32(out->key_counts + 4 * place, (uint32_t)r.key_count);
    *position += r.size;
    *key_position += r.key_count;
    return GOOD;
}

/* Rows that are not taken in their order are fetched from memory beforehand: a miss costs as much as encoding a row. */
enum { AHEAD = 12, LINE = 64, FETCHED = 8 * LINE };

static inline void fetch_text(const Column *column, int64_t i) {
    Text text;
    if (!column->there || !text_of(column, i, &text) || text.at == NULL) return;
    for (int64_t at = 0; at < text.size && at < FETCHED; at += LINE) __builtin_prefetch(text.at + at);
    if (text.size) __builtin_prefetch(text.at + (text.size < FETCHED ? text.size : FETCHED) - 1);
}

static void fetch_row(const Batch *b, int64_t row) {
    int64_t first, last;
    bool null;
    if (row < 0 || row >= b->n) return;
    fetch_text(&b->body, row);
    fetch_text(&b->unique_key, row);
    fetch_text(&b->tags, row);
    if (!b->key_lists.there)
        fetch_text(&b->keys, row);
    else if (range_of(&b->key_lists, row, &first, &last, &null) && first < last)
        fetch_text(&b->keys, first);
    if (b->pair_lists.there && range_of(&b->pair_lists, row, &first, &last, &null) && first < last) {
        fetch_text(&b->names, first);
        fetch_text(&b->values, first);
    }
}

static bool raised(int code, int64_t row) {
    if (code == DAMAGED) PyErr_Format(PyExc_ValueError, "row %lld: its offsets lead outside the column", (long long)row);
    if (code == TOO_SMALL) PyErr_SetString(PyExc_ValueError, "out: the records do not fit; the columns have changed");
    return code == DAMAGED || code == TOO_SMALL;
}

/* encode_size(batch): (bytes of all records, index hashes), or None if a row cannot be stored. */
PyObject *kernel_encode_size(PyObject *module, PyObject *batch) {
    (void)module;
    Batch b;
    PyObject *found = NULL;
    if (take_batch(batch, &b)) {
        int64_t size = 0, keys = 0, row = 0;
        int code = GOOD;
        Py_BEGIN_ALLOW_THREADS
        for (; row < b.n; row++) {
            Row r;
            code = measure(&b, row, &r);
            if (code != GOOD) break;
            size += r.size; /* n is below 2**60, and a record below 2**31: should it overflow, `encode` notices */
            keys += r.key_count;
        }
        Py_END_ALLOW_THREADS
        if (code == BAD_ROW)
            found = Py_NewRef(Py_None);
        else if (!raised(code, row))
            found = Py_BuildValue("LL", (long long)size, (long long)keys);
    }
    drop_batch(&b);
    return found;
}

/* encode(batch, order or None, data, starts, tags_codes, key_hashes, key_counts): the sum of the row hashes, or None. */
PyObject *kernel_encode(PyObject *module, PyObject *arguments) {
    (void)module;
    Batch b;
    PyObject *batch, *found = NULL;
    Py_buffer order, data, starts, tags_codes, key_hashes, key_counts;
    if (!PyArg_ParseTuple(arguments, "Oz*w*w*w*w*w*", &batch, &order, &data, &starts, &tags_codes, &key_hashes, &key_counts))
        return NULL;
    if (take_batch(batch, &b) && optional(&order, b.n, 8, "order") && holds(&starts, b.n + 1, 8, "starts") &&
        holds(&tags_codes, b.n, 8, "tags_codes") && holds(&key_counts, b.n, 4, "key_counts") &&
        item_count(&key_hashes, 4, "key_hashes") >= 0) {
        Output out = {data.buf, starts.buf, tags_codes.buf, key_hashes.buf, key_counts.buf, data.len, key_hashes.len / 4, 0};
        Names known;
        known.count = 0;
        int64_t position = 0, key_position = 0, row = 0;
        int code = GOOD;
        Py_BEGIN_ALLOW_THREADS
        for (int64_t place = 0; place < b.n && code == GOOD; place++) {
            row = order.buf == NULL ? place : native_i64((const uint8_t *)order.buf + 8 * place);
            if (order.buf != NULL && place + AHEAD < b.n)
                fetch_row(&b, native_i64((const uint8_t *)order.buf + 8 * (place + AHEAD)));
            if (row < 0 || row >= b.n) {
                code = DAMAGED;
                break;
            }
            code = encode_row(&b, row, &out, &position, &key_position, &known, place);
        }
        Py_END_ALLOW_THREADS
        put_native_64(out.starts + 8 * b.n, (uint64_t)position);
        if (code == GOOD && (position != out.size || key_position != out.key_hash_count)) code = TOO_SMALL;
        if (code == BAD_ROW)
            found = Py_NewRef(Py_None);
        else if (!raised(code, row))
            found = PyLong_FromUnsignedLongLong(out.hash_sum);
    }
    drop_batch(&b);
    PyBuffer_Release(&order);
    PyBuffer_Release(&data);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&tags_codes);
    PyBuffer_Release(&key_hashes);
    PyBuffer_Release(&key_counts);
    return found;
}

/* ---- stamping */

/* stamp(data, starts, queue_offsets, physical_offsets, store_timestamp_ms, its position, property_crc): records back to
 * back up to the end of the data, and n numbers in each array. */
PyObject *kernel_stamp(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer data, starts, queue_offsets, physical_offsets;
    long long timestamp_ms, timestamp_position;
    int property_crc;
    if (!PyArg_ParseTuple(arguments, "w*y*y*y*LLp", &data, &starts, &queue_offsets, &physical_offsets, &timestamp_ms,
                          &timestamp_position, &property_crc))
        return NULL;
    Py_ssize_t n = item_count(&starts, 8, "starts");
    bool good = n >= 0 && holds(&queue_offsets, n, 8, "queue_offsets") &&
                holds(&physical_offsets, n, 8, "physical_offsets");
    if (good && (timestamp_position < 0 || timestamp_position > MIN_RECORD_SIZE - 8)) {
        PyErr_Format(PyExc_ValueError, "store_timestamp_position: found %lld", timestamp_position);
        good = false;
    }
    const uint8_t *from = starts.buf, *queues = queue_offsets.buf, *places = physical_offsets.buf;
    for (Py_ssize_t i = 0; good && i < n; i++) {
        int64_t start = native_i64(from + 8 * i), end = i + 1 < n ? native_i64(from + 8 * i + 8) : data.len;
        if (start >= 0 && end >= MIN_RECORD_SIZE && end <= data.len && start <= end - MIN_RECORD_SIZE) continue;
        PyErr_Format(PyExc_ValueError, "record %zd: found %lld to %lld; allowed is 0 to %zd, and 91 bytes or more", i,
                     (long long)start, (long long)end, data.len);
        good = false;
    }
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i++) {
            int64_t start = native_i64(from + 8 * i), end = i + 1 < n ? native_i64(from + 8 * i + 8) : data.len;
            stamp_one((uint8_t *)data.buf + start, end - start, native_i64(queues + 8 * i), native_i64(places + 8 * i),
                      timestamp_ms, timestamp_position, property_crc);
        }
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&queue_offsets);
    PyBuffer_Release(&physical_offsets);
    if (!good) return NULL;
    Py_RETURN_NONE;
}
