#include "error.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

bool kv_error_set(struct kv_error *e, enum kv_error_kind kind, const char *format, ...)
{
    va_list args;
    e->kind = kind;
    va_start(args, format);
    vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
    return false;
}

bool kv_error_call(struct kv_error *e, enum kv_error_kind kind, const char *call, int code, const char *format, ...)
{
    va_list args;
    e->kind = kind;
    e->call = call;
    e->code = code;
    va_start(args, format);
    vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
    return false;
}

bool kv_error_memory(struct kv_error *e)
{
    e->code = ENOMEM;
    return kv_error_set(e, KV_NO_MEMORY, "out of memory");
}
