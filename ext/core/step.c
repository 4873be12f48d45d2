#include "step.h"
#include "census.h"
#include "leg.h"
#include "poller.h"
#include <stdlib.h>

/* ---- callers' side ---- */
struct kv_stream *kv_stream_new(struct kv_layer_counter *c, uint32_t index, struct kv_turns *turns)
{
    struct kv_stream *s = calloc(1, sizeof *s);
    if (!s || !(s->turns = turns ? kv_turns_hold(turns) : kv_turns_new(c->num_slots))) {
        free(s);
        return NULL;
    }
    s->counter = c;
    s->index = index;
    kv_list_init(&s->steps);
    return s;
}

void kv_stream_free(struct kv_stream *s)
{
    kv_turns_drop(s->turns);
    free(s);
}

struct kv_step *kv_step_new(struct kv_stream *stream, uint32_t num_bumps, uint64_t deadline_ns)
{
    struct kv_step *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    kv_list_init(&s->in_stream);
    kv_list_init(&s->transfers);
    s->stream = stream;
    s->num_bumps = num_bumps;
    s->deadline_ns = deadline_ns;
    kv_live(KV_LIVE_STEPS, 1);
    return s;
}

void kv_step_free(struct kv_step *s)
{
    KV_EACH(node, &s->transfers)
        kv_transfer_free(KV_OF(node, struct kv_transfer, in_step));
    free(s);
    kv_live(KV_LIVE_STEPS, -1);
}

/* ---- poller's side ---- */
static void uncount(struct kv_poller *p, struct kv_step *s)
{
    p->num_armed -= s->counted;
    s->counted = false;
}

static void fault(struct kv_poller *p, struct kv_step *s, enum kv_step_fault kind)
{
    kv_report(p, KV_STEP_FAULT, s->stream->index, s->ticket, (uint64_t)kv_word_bumps(s->word) << 32 | kind);
}

/* Reads the step's word and releases what it allows. True when it had moved. */
static bool look(struct kv_poller *p, struct kv_step *s)
{
    uint64_t word = kv_counter_read(s->stream->counter, s->stream->turns->num_slots, s->ticket);
    if (!word || word == s->word)
        return false;
    s->word = word;
    uint32_t bumps = kv_word_bumps(word);
    KV_EACH(node, &s->transfers) {
        struct kv_transfer *x = KV_OF(node, struct kv_transfer, in_step);
        kv_leg_signalled(p->state, x->tag, bumps);
        kv_transfer_release(p, x, bumps);
    }
    if (bumps >= s->num_bumps)
        uncount(p, s);
    if (bumps > s->num_bumps && kv_turns_fault(s->stream->turns, s->ticket))
        fault(p, s, KV_MORE);
    return true;
}

/* What still waits for bumps is stopped. */
static void remove_step(struct kv_poller *p, struct kv_step *s)
{
    KV_EACH(node, &s->transfers)
        kv_transfer_stop(p, KV_OF(node, struct kv_transfer, in_step));
    uncount(p, s);
    kv_list_remove(&s->in_stream);
    kv_step_free(s);
}

static void finish(struct kv_poller *p, struct kv_step *s, enum kv_step_fault when_short)
{
    look(p, s);   /* its last bumps may have come after the later ticket was issued to us */
    uint32_t bumps = kv_word_bumps(s->word);
    bool is_short = bumps < s->num_bumps && kv_turns_fault(s->stream->turns, s->ticket);
    bool ended = kv_turns_give_back(s->stream->turns, s->ticket);   /* before any record says so */
    if (is_short)
        fault(p, s, when_short);
    else if (ended)
        kv_report(p, KV_STEP_ENDED, s->stream->index, s->ticket, bumps);
    remove_step(p, s);
}

static void finish_older(struct kv_poller *p, struct kv_step *started)
{
    struct kv_node *steps = &started->stream->steps;
    while (steps->next != &started->in_stream)
        finish(p, KV_OF(steps->next, struct kv_step, in_stream), KV_FEWER);
}

void kv_step_arm(struct kv_poller *p, struct kv_step *s)
{
    KV_EACH(node, &s->transfers) {
        struct kv_transfer *x = KV_OF(node, struct kv_transfer, in_step);
        if (kv_transfer_arrive(p, x) && x->ready)
            kv_transfer_release(p, x, 0);
    }
    struct kv_node *before = s->stream->steps.prev;   /* callers may have pushed out of order */
    while (before != &s->stream->steps && KV_OF(before, struct kv_step, in_stream)->ticket > s->ticket)
        before = before->prev;
    kv_list_insert(before, &s->in_stream);
    s->counted = true;
    p->num_armed++;
    if (!s->num_bumps && kv_list_empty(&s->transfers)) {
        finish(p, s, KV_FEWER);   /* nothing is released and nothing is to be shown: there is no step */
        return;
    }
    struct kv_node *later = s->in_stream.next;
    if (later != &s->stream->steps && KV_OF(later, struct kv_step, in_stream)->word)
        finish(p, s, KV_FEWER);
}

void kv_step_abandon(struct kv_poller *p, struct kv_stream *stream, uint64_t ticket)
{
    KV_EACH(node, &stream->steps) {
        struct kv_step *s = KV_OF(node, struct kv_step, in_stream);
        if (s->ticket == ticket) {
            kv_turns_give_back(s->stream->turns, ticket);
            remove_step(p, s);
        }
    }
}

unsigned kv_watch(struct kv_poller *p)
{
    unsigned moved = 0;
    for (uint32_t i = 0; i < p->num_streams; i++)
        KV_EACH(node, &p->streams[i]->steps) {
            struct kv_step *s = KV_OF(node, struct kv_step, in_stream);
            if (!look(p, s))
                continue;
            moved++;
            finish_older(p, s);
        }
    return moved;
}

void kv_watch_deadlines(struct kv_poller *p)
{
    for (uint32_t i = 0; i < p->num_streams; i++)
        KV_EACH(node, &p->streams[i]->steps) {
            struct kv_step *s = KV_OF(node, struct kv_step, in_stream);
            if (p->now_ns >= s->deadline_ns)
                finish(p, s, KV_DEADLINE);
        }
}

void kv_watch_close(struct kv_poller *p)
{
    for (uint32_t i = 0; i < p->num_streams; i++)
        KV_EACH(node, &p->streams[i]->steps)
            remove_step(p, KV_OF(node, struct kv_step, in_stream));
}
