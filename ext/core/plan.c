#include "plan.h"
#include "census.h"
#include <stdlib.h>
#include <string.h>

/* Keeps every sum of this file far below 2^64: unit indices are 31 bits wide. */
#define MAX_PAGE_BYTES (1ull << 32)
#define MAX_UNITS (1u << 16)
#define MAX_OFFSET (1ull << 62)

/* ---- templates ---- */
struct kv_template *kv_template_new(uint32_t num_runs, uint32_t num_entries)
{
    struct kv_template *t = calloc(1, sizeof *t + num_entries * sizeof *t->entries + num_runs * sizeof *t->runs);
    if (!t)
        return NULL;
    t->entries = (void *)(t + 1);
    t->runs = (void *)(t->entries + num_entries);
    t->num_runs = num_runs;
    t->num_entries = num_entries;
    atomic_init(&t->num_owners, 1);
    kv_live(KV_LIVE_TEMPLATES, 1);
    return t;
}

void kv_template_hold(struct kv_template *t)
{
    atomic_fetch_add_explicit(&t->num_owners, 1, memory_order_relaxed);
}

void kv_template_drop(struct kv_template *t)
{
    if (atomic_fetch_sub_explicit(&t->num_owners, 1, memory_order_acq_rel) > 1)
        return;
    free(t);
    kv_live(KV_LIVE_TEMPLATES, -1);
}

static bool check_run(const struct kv_run *r, const char *what, size_t index, struct kv_error *e)
{
    if (!r->rows || !r->bytes || r->bytes > UINT32_MAX || r->rows > r->bytes)
        return kv_error_set(e, KV_INVALID, "%s %zu: %llu rows in %llu bytes; want 1 <= rows <= bytes < 2^32", what,
                            index, (unsigned long long)r->rows, (unsigned long long)r->bytes);
    if (r->src_offset > MAX_OFFSET || r->dst_offset > MAX_OFFSET)
        return kv_error_set(e, KV_INVALID, "%s %zu: an offset is above 2^62", what, index);
    return true;
}

static bool check_page(const struct kv_page *g, const char *side, struct kv_error *e)
{
    if (g->page_bytes <= MAX_PAGE_BYTES && g->units >= 1 && g->units <= MAX_UNITS && g->unit_bytes <= MAX_PAGE_BYTES)
        return true;
    return kv_error_set(e, KV_INVALID, "%s pages of %llu bytes with %llu units of %llu bytes: want at most 4 GiB each "
                        "and 1 to %u units", side, (unsigned long long)g->page_bytes, (unsigned long long)g->units,
                        (unsigned long long)g->unit_bytes, MAX_UNITS);
}

bool kv_template_check(struct kv_template *t, struct kv_error *e)
{
    if (!t->num_entries)
        return kv_error_set(e, KV_INVALID, "a template needs entries");
    if (!t->row_bytes || !t->item_bytes || t->row_bytes > UINT32_MAX || t->item_bytes > t->row_bytes)
        return kv_error_set(e, KV_INVALID, "row_bytes %llu and item_bytes %llu: want 1 <= item <= row < 2^32",
                            (unsigned long long)t->row_bytes, (unsigned long long)t->item_bytes);
    if (!check_page(&t->src_page, "source", e) || !check_page(&t->dst_page, "destination", e))
        return false;
    for (uint32_t i = 0; i < t->num_runs; i++)
        if (!check_run(&t->runs[i], "run", i, e))
            return false;
    t->src_room = t->dst_room = UINT64_MAX;
    for (uint32_t i = 0; i < t->num_entries; i++) {
        const struct kv_entry *n = &t->entries[i];
        if (i && n->signal < n[-1].signal)
            return kv_error_set(e, KV_INVALID, "entry %u: signal %llu after %llu; entries come by signal", i,
                                (unsigned long long)n->signal, (unsigned long long)n[-1].signal);
        t->src_room = n->src_room < t->src_room ? n->src_room : t->src_room;
        t->dst_room = n->dst_room < t->dst_room ? n->dst_room : t->dst_room;
    }
    return true;
}

/* ---- expansion ---- */
/* Rows of one piece of a run that is too long for one write. A row is never split. */
static uint64_t piece_rows(const struct kv_template *t, uint32_t max_write_bytes)
{
    uint64_t rows = max_write_bytes / t->row_bytes;
    rows = rows ? rows : 1;
    return rows < KV_MAX_ROWS ? rows : KV_MAX_ROWS;
}

size_t kv_plan_bound(const struct kv_template *t, const struct kv_chunk *c, uint32_t max_write_bytes)
{
    uint64_t piece = piece_rows(t, max_write_bytes);
    size_t a_page = 0, edges = 0;
    for (uint32_t i = 0; i < t->num_runs; i++)
        a_page += (t->runs[i].rows + piece - 1) / piece;
    for (size_t i = 0; i < c->num_edges; i++) {
        uint64_t rows = c->edges[4 * i + 3];
        edges += rows < UINT32_MAX ? (rows + piece - 1) / piece : 0;   /* refused later */
    }
    return c->num_pages * a_page + edges;
}

struct expansion {
    const struct kv_template *t;
    struct kv_write *out;
    size_t num;
    uint64_t max_bytes, piece;
};

static bool merge(struct expansion *x, uint64_t src, uint64_t dst, const struct kv_run *r)
{
    struct kv_write *last = x->num ? &x->out[x->num - 1] : NULL;
    if (!last || src != last->src + last->bytes || dst != last->dst + last->bytes ||
        last->bytes + r->bytes > x->max_bytes || last->rows + r->rows > KV_MAX_ROWS)
        return false;
    last->bytes += (uint32_t)r->bytes;
    last->rows += (uint32_t)r->rows;
    return true;
}

/* Adds one run at its place. False when it must be split and its bytes are less than its rows need. */
static bool add(struct expansion *x, uint64_t src, uint64_t dst, const struct kv_run *r)
{
    if (merge(x, src, dst, r))
        return true;
    bool whole = r->bytes <= x->max_bytes && r->rows <= KV_MAX_ROWS;
    if (!whole && r->bytes < r->rows * x->t->row_bytes)
        return false;
    uint64_t bytes_left = r->bytes, rows_left = r->rows;
    do {   /* the last piece also takes the positions after the last row, which count nothing */
        uint64_t rows = whole || rows_left <= x->piece ? rows_left : x->piece;
        uint64_t bytes = rows == rows_left ? bytes_left : rows * x->t->row_bytes;
        x->out[x->num++] = (struct kv_write){src, dst, (uint32_t)bytes, (uint32_t)rows};
        src += bytes, dst += bytes, bytes_left -= bytes, rows_left -= rows;
    } while (rows_left);
    return true;
}

static inline uint64_t place(const struct kv_page *g, int32_t unit)
{
    uint64_t u = (uint32_t)unit;
    return g->units == 1 ? u * g->page_bytes : u / g->units * g->page_bytes + u % g->units * g->unit_bytes;
}

static bool inside(uint64_t at, uint64_t bytes, uint64_t room) { return bytes <= room && at <= room - bytes; }

static bool check_bounds(const struct kv_template *t, const struct kv_write *w, size_t index, struct kv_error *e)
{
    if (inside(w->src, w->bytes, t->src_room) && inside(w->dst, w->bytes, t->dst_room))
        return true;
    for (uint32_t i = 0; i < t->num_entries; i++) {
        const struct kv_entry *n = &t->entries[i];
        bool src_fits = inside(w->src, w->bytes, n->src_room);
        if (src_fits && inside(w->dst, w->bytes, n->dst_room))
            continue;
        return kv_error_set(e, KV_INVALID, "write %zu of entry %u leaves its %s region: bytes [%llu, %llu) of %llu",
                            index, i, src_fits ? "destination" : "source",
                            (unsigned long long)(src_fits ? w->dst : w->src),
                            (unsigned long long)((src_fits ? w->dst : w->src) + w->bytes),
                            (unsigned long long)(src_fits ? n->dst_room : n->src_room));
    }
    return true;
}

size_t kv_plan_expand(const struct kv_template *t, const struct kv_chunk *c, uint32_t max_write_bytes,
                      struct kv_write *out, struct kv_error *e)
{
    struct expansion x = {.t = t, .out = out, .max_bytes = max_write_bytes, .piece = piece_rows(t, max_write_bytes)};
    const struct kv_run *short_run = NULL;
    for (size_t i = 0; i < c->num_pages && !short_run; i++) {
        int32_t src_page = c->pages[2 * i], dst_page = c->pages[2 * i + 1];
        if (src_page < 0 || dst_page < 0) {
            kv_error_set(e, KV_INVALID, "page pair %zu is (%d, %d); pages count from 0", i, src_page, dst_page);
            return 0;
        }
        uint64_t src = place(&t->src_page, src_page), dst = place(&t->dst_page, dst_page);
        for (uint32_t r = 0; r < t->num_runs && !short_run; r++)
            if (!add(&x, src + t->runs[r].src_offset, dst + t->runs[r].dst_offset, &t->runs[r]))
                short_run = &t->runs[r];
    }
    struct kv_run edge;
    for (size_t i = 0; i < c->num_edges && !short_run; i++) {
        memcpy(&edge, c->edges + 4 * i, sizeof edge);
        if (!check_run(&edge, "edge", i, e))
            return 0;
        if (!add(&x, edge.src_offset, edge.dst_offset, &edge))
            short_run = &edge;
    }
    if (short_run) {
        kv_error_set(e, KV_INVALID, "%llu rows of %llu bytes do not fit a run of %llu bytes, which must be split",
                     (unsigned long long)short_run->rows, (unsigned long long)t->row_bytes,
                     (unsigned long long)short_run->bytes);
        return 0;
    }
    for (size_t i = 0; i < x.num; i++)
        if (!check_bounds(t, &out[i], i, e))
            return 0;
    if (!x.num)
        kv_error_set(e, KV_INVALID, "neither page pairs nor edges: there is nothing to move");
    return x.num;
}
