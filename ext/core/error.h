/* How a call says why it failed. Functions that take one return false (or 0, or NULL) after filling it. */
#ifndef KV_ERROR_H
#define KV_ERROR_H
#include <stdbool.h>

enum kv_error_kind {
    KV_OK,
    KV_INVALID,   /* the caller's arguments */
    KV_FULL,      /* no room now; nothing was done */
    KV_CLOSED,    /* the object is closed, or not in the state this call needs */
    KV_MISSING,   /* no such entry */
    KV_NO_MEMORY,
    KV_NATIVE,    /* a libfabric call; `code` is its positive errno and `call` its name */
    KV_SYSTEM,    /* a system call; likewise */
};

struct kv_error {
    enum kv_error_kind kind;
    int code;
    const char *call;
    char text[256];
};

bool kv_error_set(struct kv_error *e, enum kv_error_kind kind, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool kv_error_call(struct kv_error *e, enum kv_error_kind kind, const char *call, int code, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
bool kv_error_memory(struct kv_error *e);
#endif
