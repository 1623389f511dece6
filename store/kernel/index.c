/* Entries of an index file (files/index_table.py): each one names the entry before it in its slot. */
#include "kernel.h"

/* A page of slots is a page of the file, in which the slots lie behind a header as large as 10 slots. */
enum { ENTRY_SIZE = 20, SLOT_SIZE = 4, PAGE_SLOTS = 1024, HEADER_SLOTS = 10, AHEAD = 16 };

static inline uint32_t slot_of(const uint8_t *key_hashes, int64_t i, uint32_t slot_count) {
    return (uint32_t)native_i32(key_hashes + 4 * i) % slot_count;
}

static bool slots_fit(long long slot_count) {
    if (slot_count > 0 && slot_count <= INT32_MAX) return true;
    PyErr_Format(PyExc_ValueError, "slot_count: found %lld; allowed is 1 to 2147483647", slot_count);
    return false;
}

static inline int64_t page_count(long long slot_count) { return (slot_count - 1 + HEADER_SLOTS) / PAGE_SLOTS + 1; }

/* index_pages(key_hashes, slot_count, touched): set the flag of each page that holds the slot of a key; bool[pages]. */
PyObject *kernel_index_pages(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer key_hashes, touched;
    long long slot_count;
    if (!PyArg_ParseTuple(arguments, "y*Lw*", &key_hashes, &slot_count, &touched)) return NULL;
    Py_ssize_t n = item_count(&key_hashes, 4, "key_hashes");
    bool good = n >= 0 && slots_fit(slot_count) && holds(&touched, page_count(slot_count), 1, "touched");
    if (good) {
        uint8_t *pages = touched.buf;
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < n; i++)
            pages[(slot_of(key_hashes.buf, i, (uint32_t)slot_count) + HEADER_SLOTS) / PAGE_SLOTS] = 1;
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&key_hashes);
    PyBuffer_Release(&touched);
    if (!good) return NULL;
    Py_RETURN_NONE;
}

typedef struct {
    const uint8_t *key_hashes, *physical_offsets, *timestamps_ms, *bases, *chosen;
    uint8_t *slots, *entries;
    int64_t slots_there, first_number, begin_ms;
    uint32_t slot_count;
    bool one_time;
} Put;

/* Where a slot is among those that were chosen, in ascending order; -1 if it is not there. */
static inline int64_t place_among(const Put *put, uint32_t slot) {
    int64_t low = 0, high = put->slots_there;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if ((uint32_t)native_i32(put->chosen + 4 * middle) < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low < put->slots_there && (uint32_t)native_i32(put->chosen + 4 * low) == slot ? low : -1;
}

/* Where the slot of a key is in `slots`; -1 if it is not there. */
static inline int64_t place_of(const Put *put, uint32_t slot) {
    if (put->chosen != NULL) return place_among(put, slot);
    int64_t place = native_i64(put->bases + 8 * ((slot + HEADER_SLOTS) / PAGE_SLOTS));
    if (place < -HEADER_SLOTS || place > put->slots_there) return -1;
    place += (slot + HEADER_SLOTS) % PAGE_SLOTS;
    return place < put->slots_there ? place : -1;
}

static inline int64_t time_of(const Put *put, int64_t i) {
    return native_i64(put->timestamps_ms + (put->one_time ? 0 : 8 * i));
}

/* As RocketMQ counts them; the first entry of a new file counts from the end of the file before. */
static inline uint32_t seconds_of(const Put *put, int64_t i) {
    int64_t begin_ms = put->first_number <= 1 && i > 0 ? time_of(put, 0) : put->begin_ms, time_ms = time_of(put, i);
    if (begin_ms <= 0 || time_ms <= begin_ms) return 0;
    int64_t seconds = (time_ms - begin_ms) / 1000;
    return (uint32_t)(seconds < INT32_MAX ? seconds : INT32_MAX);
}

/* Write entries for the keys from `first` on; how many slots had none before, or -1 if a slot is not there. */
static int64_t put_entries(const Put *put, int64_t first, int64_t count, int64_t n) {
    int64_t used = 0;
    for (int64_t i = first; i < first + count; i++) {
        if (put->chosen == NULL && i + AHEAD < n) {
            int64_t ahead = place_of(put, slot_of(put->key_hashes, i + AHEAD, put->slot_count));
            if (ahead >= 0) __builtin_prefetch(put->slots + SLOT_SIZE * ahead, 1);
        }
        uint32_t hash = (uint32_t)native_i32(put->key_hashes + 4 * i), slot = hash % put->slot_count;
        int64_t place = place_of(put, slot);
        if (place < 0) return -1;
        uint8_t *at = put->slots + SLOT_SIZE * place;
        int64_t head = (int32_t)big_u32(at);
        /* A number that no entry before this put has is that of a key of this put in the same slot, or damage. */
        int64_t own = head - put->first_number;
        if (head < 0 || (own >= 0 && (own >= i || slot_of(put->key_hashes, own, put->slot_count) != slot))) head = 0;
        used += head == 0;
        uint8_t *entry = put->entries + ENTRY_SIZE * (i - first);
        put_big_32(entry, hash);
        put_big_64(entry + 4, (uint64_t)native_i64(put->physical_offsets + 8 * i));
        put_big_32(entry + 12, seconds_of(put, i));
        put_big_32(entry + 16, (uint32_t)head);
        put_big_32(at, (uint32_t)(put->first_number + i));
    }
    return used;
}

/* index_put(key_hashes, first, physical_offsets, timestamps_ms, slot_count, first_number, begin_ms, bases, chosen,
 * slots, entries): int32[n], int64[n], int64[1 or n]; as many entries as there is room for, from key `first`. `slots` has
 * whole pages, of which int64[pages] says where each one is, or the slots int32[m], which are in ascending order. */
PyObject *kernel_index_put(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer key_hashes, physical_offsets, timestamps_ms, bases, chosen, slots, entries;
    long long first, slot_count, first_number, begin_ms;
    if (!PyArg_ParseTuple(arguments, "y*Ly*y*LLLz*z*w*w*", &key_hashes, &first, &physical_offsets, &timestamps_ms,
                          &slot_count, &first_number, &begin_ms, &bases, &chosen, &slots, &entries))
        return NULL;
    Py_ssize_t n = item_count(&key_hashes, 4, "key_hashes"), count = item_count(&entries, ENTRY_SIZE, "entries");
    Py_ssize_t slots_there = item_count(&slots, SLOT_SIZE, "slots");
    bool one_time = timestamps_ms.len == 8;
    bool good = n >= 0 && count >= 0 && slots_there >= 0 && slots_fit(slot_count) &&
                holds(&physical_offsets, n, 8, "physical_offsets") &&
                (one_time || holds(&timestamps_ms, n, 8, "timestamps_ms")) &&
                (chosen.buf != NULL ? holds(&chosen, slots_there, 4, "chosen")
                                    : holds(&bases, page_count(slot_count), 8, "bases"));
    if (good && (first < 0 || count > n || first > n - count)) {
        PyErr_Format(PyExc_ValueError, "first: found %lld and %zd entries; there are %zd keys", first, count, n);
        good = false;
    }
    if (good && (first_number < 1 || first_number > INT32_MAX - n)) {
        PyErr_Format(PyExc_ValueError, "first_number: found %lld; allowed is 1 to %zd", first_number, INT32_MAX - n);
        good = false;
    }
    int64_t used = 0;
    if (good) {
        Put put = {key_hashes.buf, physical_offsets.buf, timestamps_ms.buf,
                   bases.buf,      chosen.buf,           slots.buf,
                   entries.buf,    slots_there,          first_number,
                   begin_ms,       (uint32_t)slot_count, one_time};
        Py_BEGIN_ALLOW_THREADS
        used = put_entries(&put, first, count, n);
        Py_END_ALLOW_THREADS
        if (used < 0) PyErr_SetString(PyExc_ValueError, "slots: the slot of a key is not there");
    }
    PyBuffer_Release(&key_hashes);
    PyBuffer_Release(&physical_offsets);
    PyBuffer_Release(&timestamps_ms);
    PyBuffer_Release(&bases);
    PyBuffer_Release(&chosen);
    PyBuffer_Release(&slots);
    PyBuffer_Release(&entries);
    return good && used >= 0 ? PyLong_FromLongLong(used) : NULL;
}
