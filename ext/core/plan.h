/* Write plans: a template (runs of one pair of units, a table of entries) x unit pairs -> writes.

   The list of writes is made once a chunk; it is posted for every entry of the template, shifted by its bases. */
#ifndef KV_PLAN_H
#define KV_PLAN_H
#include "error.h"
#include "state.h"
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct kv_run {   /* within a pair of units, or (an edge) relative to the entry's bases */
    uint64_t src_offset, dst_offset, bytes, rows;
};

struct kv_write {   /* offsets from an entry's bases */
    uint64_t src, dst;
    uint32_t bytes, rows;
};

struct kv_entry {   /* one (layer, plane): where its bases are, and the bumps that release it */
    const char *src;
    uint64_t dst;
    uint32_t src_region, dst_region;
    uint64_t src_room, dst_room;   /* bytes of the regions from the bases on */
    uint64_t signal;
};

/* Where units lie: unit u in page u / units, `unit_bytes` apart in it. Both sides have the same units, each of them in
   pages of its own size. */
struct kv_page { uint64_t page_bytes, units, unit_bytes; };

struct kv_template {
    _Atomic uint32_t num_owners;   /* the link's table and each transfer */
    uint32_t link;
    struct kv_page src_page, dst_page;
    uint64_t row_bytes, item_bytes;
    uint64_t src_room, dst_room;   /* the smallest of its entries: a write that fits these fits them all */
    uint32_t num_runs, num_entries;
    struct kv_run *runs;
    struct kv_entry *entries;      /* by signal */
};

/* Room for the runs and entries, which the caller fills; one owner. NULL without memory. */
struct kv_template *kv_template_new(uint32_t num_runs, uint32_t num_entries);
void kv_template_hold(struct kv_template *t);
void kv_template_drop(struct kv_template *t);

/* Checks what was filled in and takes the smallest rooms. */
bool kv_template_check(struct kv_template *t, struct kv_error *e);

struct kv_chunk {
    const int32_t *pages;   /* pairs: source unit, destination unit */
    size_t num_pages;
    const uint64_t *edges;  /* struct kv_run each; pages that are filled in part */
    size_t num_edges;
};

/* The most writes kv_plan_expand can make of this chunk. */
size_t kv_plan_bound(const struct kv_template *t, const struct kv_chunk *c, uint32_t max_write_bytes);

/* Expands into `out` (room for kv_plan_bound writes), merging neighbours up to max_write_bytes and 2^14 rows. Checks
   every write of every entry against both regions. Returns the number of writes, or 0 with the error. */
size_t kv_plan_expand(const struct kv_template *t, const struct kv_chunk *c, uint32_t max_write_bytes,
                      struct kv_write *out, struct kv_error *e);
#endif
