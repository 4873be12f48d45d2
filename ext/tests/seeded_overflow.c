/* A heap overflow on purpose: room for one write less than the plan has. AddressSanitizer must find it. */
#include "plan.h"
#include <stdlib.h>

int main(void)
{
    struct kv_error error;
    struct kv_template *t = kv_template_new(1, 1);
    if (!t)
        return 0;
    t->row_bytes = t->item_bytes = 1;
    t->src_page = t->dst_page = (struct kv_page){64, 1, 0};
    t->runs[0] = (struct kv_run){0, 0, 8, 8};
    t->entries[0] = (struct kv_entry){.src_room = 1 << 20, .dst_room = 1 << 20};
    int32_t pages[] = {0, 0, 1, 1, 2, 2, 3, 3};
    struct kv_chunk c = {.pages = pages, .num_pages = 4};
    struct kv_write *writes = malloc((kv_plan_bound(t, &c, 64) - 1) * sizeof *writes);
    if (!writes || !kv_template_check(t, &error))
        return 0;
    size_t num = kv_plan_expand(t, &c, 64, writes, &error);
    free(writes);
    kv_template_drop(t);
    return num != 4;
}
