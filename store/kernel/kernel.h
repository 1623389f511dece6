/* The compiled kernel of messagestore.format: what all its files share.
 *
 * The kernel takes buffers and fills buffers. It allocates nothing whose size was read from a file, it touches no byte
 * of a buffer that it has not compared with the buffer's size, and it releases the GIL while it works (message.c, which
 * takes Python's own objects, only for large bodies). format/kernel.py loads it, and the modules of messagestore.format
 * call it where it is there.
 *
 * To add a function: declare its PyCFunction here, define it in a file of its area, add it to the table in module.c and
 * to `Kernel` in format/kernel.py, and raise KERNEL_VERSION here and VERSION there.
 */
#ifndef MESSAGESTORE_KERNEL_H
#define MESSAGESTORE_KERNEL_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel is written for little-endian machines; the package works without it"
#endif

#define KERNEL_VERSION 7

/* ---- numbers in buffers; no address needs to be aligned */

static inline int32_t native_i32(const void *at) { int32_t v; memcpy(&v, at, 4); return v; }
static inline int64_t native_i64(const void *at) { int64_t v; memcpy(&v, at, 8); return v; }
static inline uint64_t native_u64(const void *at) { uint64_t v; memcpy(&v, at, 8); return v; }
static inline void put_native_32(void *at, uint32_t v) { memcpy(at, &v, 4); }
static inline void put_native_64(void *at, uint64_t v) { memcpy(at, &v, 8); }

static inline uint16_t big_u16(const void *at) { uint16_t v; memcpy(&v, at, 2); return __builtin_bswap16(v); }
static inline uint32_t big_u32(const void *at) { uint32_t v; memcpy(&v, at, 4); return __builtin_bswap32(v); }
static inline uint64_t big_u64(const void *at) { uint64_t v; memcpy(&v, at, 8); return __builtin_bswap64(v); }
static inline void put_big_16(void *at, uint16_t v) { v = __builtin_bswap16(v); memcpy(at, &v, 2); }
static inline void put_big_32(void *at, uint32_t v) { v = __builtin_bswap32(v); memcpy(at, &v, 4); }
static inline void put_big_64(void *at, uint64_t v) { v = __builtin_bswap64(v); memcpy(at, &v, 8); }

/* ---- arguments */

/* The number of items of `width` bytes in a buffer; -1 with an exception if the size is no multiple of it. */
Py_ssize_t item_count(const Py_buffer *buffer, Py_ssize_t width, const char *name);

/* Whether a buffer holds exactly `count` items of `width` bytes; false with an exception if not. */
bool holds(const Py_buffer *buffer, Py_ssize_t count, Py_ssize_t width, const char *name);

/* Whether 0 <= start <= end <= size for n ranges of int64; false with a ValueError that names the first bad one.
 * Called with the GIL held. */
bool ranges_fit(const Py_buffer *starts, const Py_buffer *ends, Py_ssize_t n, Py_ssize_t size);

/* ---- checksums (crc32.c) */

/* CRC-32 as zlib computes it: `crc` is that of the bytes before, or 0. */
extern uint32_t (*crc32_update)(uint32_t crc, const uint8_t *data, size_t size);
void crc32_choose(void);
extern const char *crc32_method;

PyObject *kernel_crc32(PyObject *module, PyObject *arguments);
PyObject *kernel_crcs_of_ranges(PyObject *module, PyObject *arguments);
PyObject *kernel_crc32_methods(PyObject *module, PyObject *arguments);

/* ---- XXH3 with 64 bits (xxh3.c) */

uint64_t xxh3(const uint8_t *data, size_t size);
PyObject *kernel_xxh3_of_ranges(PyObject *module, PyObject *arguments);

/* ---- Java's String.hashCode of UTF-8 text (javahash.c) */

/* `before` is the hash of the text before this one, or 0. */
uint32_t java_hash(uint32_t before, const uint8_t *text, size_t size);

/* RocketMQ's IndexFile.indexKeyHashMethod: Java's abs, with 0 for -2147483648. */
static inline uint32_t index_hash(uint32_t hash) {
    return ((hash & 0x80000000u) ? 0u - hash : hash) & 0x7fffffffu;
}

PyObject *kernel_java_hashes(PyObject *module, PyObject *arguments);
PyObject *kernel_index_hashes(PyObject *module, PyObject *arguments);

/* ---- columns to records (encode.c) */

PyObject *kernel_encode_size(PyObject *module, PyObject *batch);
PyObject *kernel_encode(PyObject *module, PyObject *arguments);
PyObject *kernel_stamp(PyObject *module, PyObject *arguments);

/* ---- one message to one record (message.c) */

PyObject *kernel_encode_message(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *kernel_stamp_message(PyObject *module, PyObject *const *arguments, Py_ssize_t count);

/* ---- records to columns (decode.c), and where records begin (scan.c) */

PyObject *kernel_frame(PyObject *module, PyObject *arguments);
PyObject *kernel_measure(PyObject *module, PyObject *arguments);
PyObject *kernel_fill_values(PyObject *module, PyObject *arguments);
PyObject *kernel_fill_keys(PyObject *module, PyObject *arguments);
PyObject *kernel_fill_map(PyObject *module, PyObject *arguments);
PyObject *kernel_fill_numbers(PyObject *module, PyObject *arguments);
PyObject *kernel_scan(PyObject *module, PyObject *arguments);
PyObject *kernel_heads(PyObject *module, PyObject *arguments);

/* ---- entries of an index file (index.c) */

PyObject *kernel_index_pages(PyObject *module, PyObject *arguments);
PyObject *kernel_index_put(PyObject *module, PyObject *arguments);

/* ---- parts of a file (parts.c) */

PyObject *kernel_pread_parts(PyObject *module, PyObject *arguments);
PyObject *kernel_pwrite_parts(PyObject *module, PyObject *arguments);

#endif
