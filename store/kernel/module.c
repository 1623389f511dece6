/* The extension module messagestore.format._kernel: its functions, and the checks of their arguments. */
#include "kernel.h"

Py_ssize_t item_count(const Py_buffer *buffer, Py_ssize_t width, const char *name) {
    if (buffer->len % width) {
        PyErr_Format(PyExc_ValueError, "%s: found %zd bytes; allowed are items of %zd bytes", name, buffer->len, width);
        return -1;
    }
    return buffer->len / width;
}

bool holds(const Py_buffer *buffer, Py_ssize_t count, Py_ssize_t width, const char *name) {
    if (buffer->len % width == 0 && buffer->len / width == count) return true;
    PyErr_Format(PyExc_ValueError, "%s: found %zd bytes; allowed are %zd items of %zd bytes", name, buffer->len, count,
                 width);
    return false;
}

bool ranges_fit(const Py_buffer *starts, const Py_buffer *ends, Py_ssize_t n, Py_ssize_t size) {
    const uint8_t *from = starts->buf, *to = ends->buf;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t start = native_i64(from + 8 * i), end = native_i64(to + 8 * i);
        if (start >= 0 && start <= end && end <= size) continue;
        PyErr_Format(PyExc_ValueError, "range %zd: found %lld to %lld; allowed is 0 to %zd", i, (long long)start,
                     (long long)end, size);
        return false;
    }
    return true;
}

static PyMethodDef methods[] = {
    {"crc32", kernel_crc32, METH_VARARGS, "crc32(data, crc=0): CRC-32 of the data, as zlib computes it."},
    {"crc32_methods", kernel_crc32_methods, METH_VARARGS, "crc32_methods(data, crc=0): the CRC-32 by each method."},
    {"crcs_of_ranges", kernel_crcs_of_ranges, METH_VARARGS,
     "crcs_of_ranges(data, starts, ends, out): CRC-32 of each range, into uint32[n]."},
    {"xxh3_of_ranges", kernel_xxh3_of_ranges, METH_VARARGS,
     "xxh3_of_ranges(data, starts, ends, out): XXH3 of each range, into uint64[n]."},
    {"java_hashes", kernel_java_hashes, METH_VARARGS,
     "java_hashes(data, starts, ends, before, out): String.hashCode of the UTF-8 text in each range, into int32[n]."},
    {"index_hashes", kernel_index_hashes, METH_VARARGS,
     "index_hashes(data, starts, ends, before, out): the index hash of each range, into int32[n]."},
    {"encode_size", kernel_encode_size, METH_O, "encode_size(batch): the bytes and index hashes of all records, or None."},
    {"encode", kernel_encode, METH_VARARGS,
     "encode(batch, order, data, starts, tags_codes, key_hashes, key_counts): the sums of the row hashes, or None."},
    {"stamp", kernel_stamp, METH_VARARGS,
     "stamp(data, starts, queue_offsets, physical_offsets, store_timestamp_ms, position, property_crc)"},
    {"encode_message", (PyCFunction)(void (*)(void))kernel_encode_message, METH_FASTCALL,
     "encode_message(body, topic, magic, topic_hash, queue_id, flag, sys_flag, born_timestamp_ms, born_host, store_host,"
     " reconsume_times, prepared_offset, keys, unique_key, tags, wait, properties, extra, reserved, max_body_size,"
     " property_crc): the record of one message, its tags code and index hashes, or None."},
    {"stamp_message", (PyCFunction)(void (*)(void))kernel_stamp_message, METH_FASTCALL,
     "stamp_message(record, queue_offset, physical_offset, store_timestamp_ms, property_crc)"},
    {"frame", kernel_frame, METH_VARARGS,
     "frame(data, starts, sizes, rows, verify, topic, queue_id, queue_offsets, physical_offsets, renumbered):"
     " check records, and note where their parts are."},
    {"measure", kernel_measure, METH_VARARGS,
     "measure(data, rows, texts, reserved, wanted, totals): read texts and properties, and sum up their sizes."},
    {"fill_values", kernel_fill_values, METH_VARARGS,
     "fill_values(data, rows, texts, which, offsets, bytes, valid): one value of each record."},
    {"fill_keys", kernel_fill_keys, METH_VARARGS,
     "fill_keys(data, rows, texts, lists, offsets, bytes): the keys of each record."},
    {"fill_map", kernel_fill_map, METH_VARARGS,
     "fill_map(data, rows, texts, reserved, kind, maps, name_offsets, names, value_offsets, values): properties."},
    {"fill_numbers", kernel_fill_numbers, METH_VARARGS,
     "fill_numbers(data, rows, position, behind, width, out): one field of each head."},
    {"scan", kernel_scan, METH_VARARGS,
     "scan(data, usable, physical_offset, verify, starts): the chain of records from the first byte on."},
    {"heads", kernel_heads, METH_VARARGS, "heads(data, starts, out): the heads of records, in native byte order."},
    {"index_pages", kernel_index_pages, METH_VARARGS,
     "index_pages(key_hashes, slot_count, touched): which pages of slots hold the slots of keys."},
    {"index_put", kernel_index_put, METH_VARARGS,
     "index_put(key_hashes, first, physical_offsets, timestamps_ms, slot_count, first_number, begin_ms, bases, slots,"
     " entries): entries of an index file, and the slots that lead to them."},
    {"pread_parts", kernel_pread_parts, METH_VARARGS,
     "pread_parts(fd, out, positions, starts, ends): fill ranges of `out` from a file, one after the other; how many."},
    {"pwrite_parts", kernel_pwrite_parts, METH_VARARGS,
     "pwrite_parts(fd, data, positions, starts, ends): write ranges of `data` to a file, one after the other; how many."},
    {NULL, NULL, 0, NULL},
};

static int begin(PyObject *module) {
    crc32_choose();
    return PyModule_AddIntConstant(module, "VERSION", KERNEL_VERSION) < 0 ||
                   PyModule_AddStringConstant(module, "CRC32_METHOD", crc32_method) < 0
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)begin}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_kernel", "The compiled kernel of messagestore.format: buffers in, buffers out.", 0, methods,
    slots,                 NULL,      NULL,                                                                   NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
