/* One message to one record, for single puts: the other side of MessageExtEncoder.java.
 *
 * The parts are Python's own objects: a put is over before columns of Arrow are made. First it is noted where each text
 * is and how long; no code of Python runs from then to the last use, so no list can change in between. Whatever is not
 * as usual (another type, a text or number that cannot be stored, very many texts) gives None, and the scalar codec of
 * format/record.py encodes the message, or says what is wrong with it.
 */
#include "texts.h"

enum { HEAD_SIZE = 88, HOST_V4_SIZE = 8, HOST_V6_SIZE = 20, BORN_HOST_V6 = 0x10, STORE_HOST_V6 = 0x20 };
enum { SYS_FLAG_POSITION = 36, STORE_TIMESTAMP_POSITION = 56 };
enum { MAX_KEYS = 32, MAX_PAIRS = 64, MAX_TOPIC_SIZE = 257, LARGE_BODY_SIZE = 64 << 10 };

typedef struct {
    Text name, value;
} Pair;

typedef struct {
    Py_buffer body;
    Text topic, born_host, store_host, unique_key, tags, keys[MAX_KEYS];
    Pair pairs[MAX_PAIRS];
    int64_t magic, topic_hash, queue_id, flag, sys_flag, born_timestamp_ms, reconsume_times, prepared_offset, max_body_size;
    int64_t properties_size, size;
    int key_count, pair_count;
    bool wait, property_crc;
} Message;

/* ---- the arguments */

static bool take_number(PyObject *from, int bits, int64_t *number) {
    if (!PyLong_Check(from)) return false;
    int overflow;
    long long value = PyLong_AsLongLongAndOverflow(from, &overflow);
    if (overflow || (bits == 32 && (value < INT32_MIN || value > INT32_MAX))) return false;
    *number = value;
    return true;
}

static bool take_bytes(PyObject *from, Text *text) {
    char *at;
    Py_ssize_t size;
    if (!PyBytes_Check(from)) return false;
    if (PyBytes_AsStringAndSize(from, &at, &size) < 0) {
        PyErr_Clear();
        return false;
    }
    text->at = (const uint8_t *)at;
    text->size = size;
    return true;
}

/* Any text that UTF-8 can hold. */
static bool take_any_text(PyObject *from, Text *text) {
    Py_ssize_t size;
    if (!PyUnicode_CheckExact(from)) return false;
    text->at = (const uint8_t *)PyUnicode_AsUTF8AndSize(from, &size);
    if (text->at == NULL) PyErr_Clear(); /* a lone surrogate, or no memory */
    text->size = size;
    return text->at != NULL && size <= MAX_PROPERTIES_SIZE;
}

/* A text that can be stored: neither empty nor with a separator in it. */
static bool take_text(PyObject *from, bool blanks, Text *text) {
    return take_any_text(from, text) && text->size && text_is_legal(*text, blanks);
}

static bool take_optional_text(PyObject *from, bool blanks, Text *text) {
    text->at = NULL;
    return from == Py_None || take_text(from, blanks, text);
}

/* The number of items of a list or a tuple; -1 for another object. */
static Py_ssize_t length_of(PyObject *items) {
    return PyTuple_CheckExact(items) ? PyTuple_Size(items) : PyList_CheckExact(items) ? PyList_Size(items) : -1;
}

static PyObject *item_of(PyObject *items, Py_ssize_t i) {
    return PyTuple_CheckExact(items) ? PyTuple_GetItem(items, i) : PyList_GetItem(items, i);
}

static bool take_keys(PyObject *from, Message *m) {
    Py_ssize_t count = length_of(from);
    if (count < 0 || count > MAX_KEYS) return false;
    for (Py_ssize_t i = 0; i < count; i++)
        if (!take_text(item_of(from, i), false, &m->keys[i])) return false;
    m->key_count = (int)count;
    return true;
}

/* The user's properties: a dict whose names are not reserved; without reserved names, there are no properties. */
static bool take_properties(PyObject *from, PyObject *reserved, Message *m) {
    PyObject *name, *value;
    Py_ssize_t position = 0;
    if (reserved == Py_None) return true;
    if (!PyDict_CheckExact(from) || !PyFrozenSet_CheckExact(reserved)) return false;
    while (PyDict_Next(from, &position, &name, &value)) {
        if (m->pair_count == MAX_PAIRS) return false;
        Pair *pair = &m->pairs[m->pair_count++];
        if (!take_text(name, true, &pair->name) || !take_text(value, true, &pair->value)) return false;
        int found = PySet_Contains(reserved, name);
        if (found < 0) PyErr_Clear();
        if (found) return false;
    }
    return true;
}

/* The store's own properties: pairs of texts, behind the user's. */
static bool take_pairs(PyObject *from, Message *m) {
    Py_ssize_t count = length_of(from);
    if (count < 0 || count > MAX_PAIRS - m->pair_count) return false;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = item_of(from, i);
        Pair *pair = &m->pairs[m->pair_count++];
        if (!PyTuple_CheckExact(item) || PyTuple_Size(item) != 2) return false;
        if (!take_any_text(PyTuple_GetItem(item, 0), &pair->name)) return false;
        if (!take_any_text(PyTuple_GetItem(item, 1), &pair->value)) return false;
    }
    return true;
}

static bool host_is_good(Text host) { return host.size == HOST_V4_SIZE || host.size == HOST_V6_SIZE; }

/* Add up the sizes; false if something is too large. Each size is far below what an int64 holds. */
static bool measure(Message *m) {
    int64_t size = m->property_crc ? CRC_SIZE : 0;
    for (int i = 0; i < m->key_count; i++) size += m->keys[i].size + 1; /* the blank behind it, or the separator */
    if (m->key_count) size += (int64_t)sizeof KEYS - 1;
    if (m->unique_key.at != NULL) size += (int64_t)sizeof UNIQUE_KEY - 1 + m->unique_key.size + 1;
    if (m->tags.at != NULL) size += (int64_t)sizeof TAGS - 1 + m->tags.size + 1;
    if (!m->wait) size += (int64_t)sizeof WAIT_FALSE - 1;
    for (int i = 0; i < m->pair_count; i++) size += m->pairs[i].name.size + 1 + m->pairs[i].value.size + 1;
    if (size > MAX_PROPERTIES_SIZE || m->body.len > m->max_body_size) return false;
    m->properties_size = size;
    m->size = HEAD_SIZE + m->born_host.size + m->store_host.size - 2 * HOST_V4_SIZE + m->body.len + m->topic.size + 2 + size;
    return m->size <= INT32_MAX;
}

/* ---- the record */

static uint8_t *append_text(uint8_t *at, Text text) { return append(at, text.at, text.size); }

static uint8_t *append_property(uint8_t *at, const char *name, size_t size, Text value) {
    at = append_text(append(at, name, (int64_t)size), value);
    *at++ = 2;
    return at;
}

/* Write all but body and BODYCRC; it returns where the body belongs. `measure` said how large the record is. */
static uint8_t *write_record(const Message *m, uint8_t *record) {
    int64_t flags = (m->born_host.size == HOST_V6_SIZE ? BORN_HOST_V6 : 0) | (m->store_host.size == HOST_V6_SIZE ? STORE_HOST_V6 : 0);
    put_big_32(record, (uint32_t)m->size);
    put_big_32(record + 4, (uint32_t)m->magic);
    put_big_32(record + 8, 0);
    put_big_32(record + 12, (uint32_t)m->queue_id);
    put_big_32(record + 16, (uint32_t)m->flag);
    memset(record + OFFSETS_POSITION, 0, 16);
    put_big_32(record + SYS_FLAG_POSITION, (uint32_t)((m->sys_flag & ~(BORN_HOST_V6 | STORE_HOST_V6)) | flags));
    put_big_64(record + 40, (uint64_t)m->born_timestamp_ms);
    uint8_t *at = append_text(record + 48, m->born_host);
    put_big_64(at, 0);
    at = append_text(at + 8, m->store_host);
    put_big_32(at, (uint32_t)m->reconsume_times);
    put_big_64(at + 4, (uint64_t)m->prepared_offset);
    put_big_32(at + 12, (uint32_t)m->body.len);
    uint8_t *body = at + 16;
    at = append_text(body + m->body.len, m->topic);
    put_big_16(at, (uint16_t)m->properties_size);
    at += 2;
    if (m->key_count) {
        at = append(at, KEYS, sizeof KEYS - 1);
        for (int i = 0; i < m->key_count; i++) {
            at = append_text(at, m->keys[i]);
            *at++ = i + 1 < m->key_count ? ' ' : 2;
        }
    }
    if (m->unique_key.at != NULL) at = append_property(at, UNIQUE_KEY, sizeof UNIQUE_KEY - 1, m->unique_key);
    if (m->tags.at != NULL) at = append_property(at, TAGS, sizeof TAGS - 1, m->tags);
    if (!m->wait) at = append(at, WAIT_FALSE, sizeof WAIT_FALSE - 1);
    for (int i = 0; i < m->pair_count; i++) {
        at = append_text(at, m->pairs[i].name);
        *at++ = 1;
        at = append_text(at, m->pairs[i].value);
        *at++ = 2;
    }
    if (m->property_crc) append(at, PROPERTY_CRC, CRC_SIZE);
    return body;
}

/* The bytes of the body are checked as they are in the record: its owner may change them meanwhile. */
static void write_body(const Message *m, uint8_t *record, uint8_t *body) {
    append(body, m->body.buf, m->body.len);
    put_big_32(record + 8, crc32_update(0, body, (size_t)m->body.len) & 0x7FFFFFFFu);
}

/* The index hashes of UNIQ_KEY and of the keys, as a tuple. */
static PyObject *hashes_of(const uint32_t *hashes, int count) {
    PyObject *found = PyTuple_New(count);
    for (int i = 0; found != NULL && i < count; i++) {
        PyObject *hash = PyLong_FromLong((long)hashes[i]);
        if (hash == NULL || PyTuple_SetItem(found, i, hash) < 0) {
            Py_DECREF(found);
            found = NULL;
        }
    }
    return found;
}

static PyObject *encode(Message *m) {
    uint32_t hashes[MAX_KEYS + 1];
    int hash_count = 0;
    if (!measure(m)) return Py_NewRef(Py_None);
    PyObject *data = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)m->size); /* no object that is collected */
    if (data == NULL) return NULL;
    uint8_t *record = (uint8_t *)PyByteArray_AsString(data), *body = write_record(m, record);
    long tags_code = m->tags.at == NULL ? 0 : (long)(int32_t)java_hash(0, m->tags.at, (size_t)m->tags.size);
    if (m->unique_key.at != NULL)
        hashes[hash_count++] = index_hash(java_hash((uint32_t)m->topic_hash, m->unique_key.at, (size_t)m->unique_key.size));
    for (int i = 0; i < m->key_count; i++)
        hashes[hash_count++] = index_hash(java_hash((uint32_t)m->topic_hash, m->keys[i].at, (size_t)m->keys[i].size));
    if (m->body.len > LARGE_BODY_SIZE) { /* from here on, no text is used */
        Py_BEGIN_ALLOW_THREADS
        write_body(m, record, body);
        Py_END_ALLOW_THREADS
    } else {
        write_body(m, record, body);
    }
    PyObject *code = PyLong_FromLong(tags_code), *keys = hashes_of(hashes, hash_count), *found = NULL;
    if (code != NULL && keys != NULL) found = PyTuple_Pack(3, data, code, keys);
    Py_XDECREF(code);
    Py_XDECREF(keys);
    Py_DECREF(data);
    return found;
}

/* encode_message(body, topic, magic, topic_hash, queue_id, flag, sys_flag, born_timestamp_ms, born_host, store_host,
 * reconsume_times, prepared_offset, keys, unique_key, tags, wait, properties, extra, reserved, max_body_size,
 * property_crc): (record, tags code, index hashes), or None. */
PyObject *kernel_encode_message(PyObject *module, PyObject *const *a, Py_ssize_t count) {
    (void)module;
    Message m;
    if (count != 21) {
        PyErr_Format(PyExc_TypeError, "encode_message: found %zd arguments; allowed are 21", count);
        return NULL;
    }
    m.key_count = m.pair_count = 0;
    bool good = take_bytes(a[1], &m.topic) && m.topic.size <= MAX_TOPIC_SIZE && take_number(a[2], 32, &m.magic) &&
                take_number(a[3], 32, &m.topic_hash) && take_number(a[4], 32, &m.queue_id) &&
                take_number(a[5], 32, &m.flag) && take_number(a[6], 32, &m.sys_flag) &&
                take_number(a[7], 64, &m.born_timestamp_ms) && take_bytes(a[8], &m.born_host) &&
                take_bytes(a[9], &m.store_host) && host_is_good(m.born_host) && host_is_good(m.store_host) &&
                take_number(a[10], 32, &m.reconsume_times) && take_number(a[11], 64, &m.prepared_offset) &&
                PyBool_Check(a[15]) && take_number(a[19], 32, &m.max_body_size) && PyBool_Check(a[20]);
    if (!good) Py_RETURN_NONE;
    m.wait = a[15] == Py_True;
    m.property_crc = a[20] == Py_True;
    if (PyObject_GetBuffer(a[0], &m.body, PyBUF_SIMPLE) < 0) { /* first, because it may run code of Python */
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    PyObject *found = NULL;
    if (take_keys(a[12], &m) && take_optional_text(a[13], false, &m.unique_key) &&
        take_optional_text(a[14], true, &m.tags) && take_properties(a[16], a[18], &m) && take_pairs(a[17], &m))
        found = encode(&m);
    else
        found = Py_NewRef(Py_None);
    PyBuffer_Release(&m.body);
    return found;
}

/* stamp_message(record, queue_offset, physical_offset, store_timestamp_ms, property_crc): as `stamp`; a bytearray. */
PyObject *kernel_stamp_message(PyObject *module, PyObject *const *a, Py_ssize_t count) {
    (void)module;
    int64_t queue_offset, physical_offset, timestamp_ms;
    if (count != 5 || !PyByteArray_CheckExact(a[0]) || !take_number(a[1], 64, &queue_offset) ||
        !take_number(a[2], 64, &physical_offset) || !take_number(a[3], 64, &timestamp_ms) || !PyBool_Check(a[4])) {
        PyErr_SetString(PyExc_TypeError, "stamp_message: allowed are a bytearray, three ints of 64 bits and a bool");
        return NULL;
    }
    uint8_t *record = (uint8_t *)PyByteArray_AsString(a[0]);
    int64_t size = PyByteArray_Size(a[0]);
    if (size < MIN_RECORD_SIZE) {
        PyErr_Format(PyExc_ValueError, "stamp_message: found %lld bytes; allowed are 91 or more", (long long)size);
        return NULL;
    }
    bool v6 = big_u32(record + SYS_FLAG_POSITION) & BORN_HOST_V6;
    int64_t position = STORE_TIMESTAMP_POSITION + (v6 ? HOST_V6_SIZE - HOST_V4_SIZE : 0);
    stamp_one(record, size, queue_offset, physical_offset, timestamp_ms, position, a[4] == Py_True);
    Py_RETURN_NONE;
}
