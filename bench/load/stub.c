/* A stand-in for llama-server that costs next to nothing: one thread, epoll, answers made beforehand.
 *
 *     stub SLOTS BUILD FOLDER
 *
 * Listens on a free port of 127.0.0.1 and prints it. A generating request says in its text what is wanted, so that the
 * wish outlives proxies that write the body anew: `@bench chunks=N gap=US delay=US id=N@`, all of it optional. With
 * chunks the answer is an event stream of N content frames, one every `gap` microseconds, the first after `delay` and
 * the second at any time within `gap`, so that streams which began together do not beat together; without, it is one
 * JSON object after `delay`. Every content frame has T<nanoseconds>T in its text: the monotonic clock when it was made.
 * `GET /bench/tasks` says how many such requests came, `GET /bench/closed` when the client of one
 * with an `id` went away before its answer's end, as lines `id nanoseconds`. A slot is saved as a small file in FOLDER. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "http.h"

enum { HEAD_MAX = 65536, PEEK_MAX = 16384, READ_MAX = 1 << 20, FRAME_MAX = 512, CLOSED_MAX = 65536 };

enum state { READ_HEAD, READ_BODY, READ_SIZE, READ_CHUNK, READ_CHUNK_END, READ_TRAILER, ANSWERING };

struct connection {
    int fd;
    enum state state;
    bool writes; /* waits until it can write */
    bool close;
    bool generates;
    char head[HEAD_MAX];
    size_t head_len;
    char line[64]; /* a line of chunk framing */
    size_t line_len;
    uint64_t left; /* of the body, or of a chunk */
    char peek[PEEK_MAX + 1]; /* how the body begins */
    size_t peek_len;
    /* the answer */
    char *out;
    size_t out_len, out_sent, out_size;
    int64_t id;
    uint64_t chunks, gap, next; /* content frames still to come; nanoseconds; 0: no timer */
    bool streams, begun, phased;
    size_t timer; /* its place in `timed`, from 1 */
};

static int epoll_fd, timer_fd;
static int slots;
static const char *build, *folder;
static uint64_t tasks;
static struct connection **timed;
static size_t timed_count, timed_size;
static struct { int64_t id; uint64_t at; } closed_log[CLOSED_MAX];
static size_t closed_count;
static char received[READ_MAX];

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t) time.tv_sec * 1000000000u + (uint64_t) time.tv_nsec;
}

static void *grown(void *memory, size_t size) {
    memory = realloc(memory, size);
    if (memory == NULL) {
        perror("realloc");
        exit(1);
    }
    return memory;
}

static void put(struct connection *c, const char *data, size_t size) {
    if (c->out_sent == c->out_len) {
        c->out_sent = c->out_len = 0;
    }
    if (c->out_len + size > c->out_size) {
        c->out_size = (c->out_len + size) * 2;
        c->out = grown(c->out, c->out_size);
    }
    memcpy(c->out + c->out_len, data, size);
    c->out_len += size;
}

static void set_timer(struct connection *c, uint64_t at) {
    if (at != 0 && c->timer == 0) {
        if (timed_count == timed_size) {
            timed_size = timed_size * 2 + 64;
            timed = grown(timed, timed_size * sizeof *timed);
        }
        timed[timed_count++] = c;
        c->timer = timed_count;
    } else if (at == 0 && c->timer != 0) {
        timed[c->timer - 1] = timed[--timed_count];
        timed[c->timer - 1]->timer = c->timer;
        c->timer = 0;
    }
    c->next = at;
}

static void want_writable(struct connection *c, bool on) {
    if (c->writes != on) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | (on ? EPOLLOUT : 0), .data.ptr = c};
        c->writes = on;
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
    }
}

static void hang_up(struct connection *c) {
    if (c->state == ANSWERING && c->id >= 0 && closed_count < CLOSED_MAX) {
        closed_log[closed_count].id = c->id;
        closed_log[closed_count++].at = now_ns();
    }
    set_timer(c, 0);
    close(c->fd);
    free(c->out);
    free(c);
}

/* False: the connection is gone. */
static bool flush(struct connection *c) {
    while (c->out_sent < c->out_len) {
        ssize_t sent = send(c->fd, c->out + c->out_sent, c->out_len - c->out_sent, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN) {
                want_writable(c, true);
                return true;
            }
            hang_up(c);
            return false;
        }
        c->out_sent += (size_t) sent;
    }
    return true;
}

static void put_chunk(struct connection *c, const char *data, size_t size) {
    char framing[32];
    put(c, framing, (size_t) sprintf(framing, "%zx\r\n", size));
    put(c, data, size);
    put(c, "\r\n", 2);
}

static void put_frame(struct connection *c, const char *delta, const char *finish, const char *more) {
    char frame[FRAME_MAX * 2];
    int size = snprintf(frame, sizeof frame,
        "data: {\"choices\":[{\"finish_reason\":%s,\"index\":0,\"delta\":{%s}}],\"created\":1767225600,"
        "\"id\":\"chatcmpl-Tq3cVb0dWm5sYk8eRz1uHn7xLa2pGf4i\",\"model\":\"local\","
        "\"system_fingerprint\":\"b9999-0a1b2c3d\",\"object\":\"chat.completion.chunk\"%s}\n\n",
        finish, delta, more);
    put_chunk(c, frame, (size_t) size);
}

static const char timings[] =
    "\"timings\":{\"cache_n\":4096,\"prompt_n\":37,\"prompt_ms\":51.238,\"prompt_per_token_ms\":1.384,"
    "\"prompt_per_second\":722.12,\"predicted_n\":12,\"predicted_ms\":240.5,\"predicted_per_token_ms\":20.04,"
    "\"predicted_per_second\":49.89}";

static void end_answer(struct connection *c) {
    set_timer(c, 0);
    c->state = READ_HEAD;
    c->head_len = 0;
    c->id = -1;
}

static void put_whole(struct connection *c, const char *type, const char *body, size_t size) {
    char head[256];
    put(c, head, (size_t) snprintf(head, sizeof head,
        "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: %s\r\nContent-Length: %zu\r\n"
        "Keep-Alive: timeout=5, max=100\r\n\r\n", type, size));
    put(c, body, size);
}

static void put_completion(struct connection *c) {
    char body[2048];
    int size = snprintf(body, sizeof body,
        "{\"choices\":[{\"finish_reason\":\"stop\",\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":"
        "\"The function returns early when the list is empty, so the loop below never runs.\"}}],"
        "\"created\":1767225600,\"model\":\"local\",\"system_fingerprint\":\"b9999-0a1b2c3d\","
        "\"object\":\"chat.completion\",\"usage\":{\"completion_tokens\":12,\"prompt_tokens\":4133,"
        "\"total_tokens\":4145,\"prompt_tokens_details\":{\"cached_tokens\":4096}},"
        "\"id\":\"chatcmpl-Tq3cVb0dWm5sYk8eRz1uHn7xLa2pGf4i\",%s}", timings);
    put_whole(c, "application/json; charset=utf-8", body, (size_t) size);
}

/* Frames that are due, no further than the client takes them; one `send` each, as llama-server does it. */
static void make_frames(struct connection *c) {
    uint64_t now = now_ns();
    if (!c->streams) {
        if (now >= c->next) {
            put_completion(c);
            end_answer(c);
        }
        return;
    }
    if (!c->begun && now >= c->next) {
        c->begun = true;
        put_frame(c, "\"role\":\"assistant\",\"content\":null", "null", "");
    }
    while (c->chunks > 0 && now >= c->next && c->out_sent == c->out_len) {
        char delta[64];
        now = now_ns();
        snprintf(delta, sizeof delta, "\"content\":\"T%lluT\"", (unsigned long long) now);
        put_frame(c, delta, "null", "");
        c->chunks--;
        uint64_t phase = c->gap * (uint64_t) (rand() % 1024) / 1024;
        set_timer(c, c->gap == 0 ? now : c->phased ? c->next + c->gap : now + phase);
        c->phased = true;
    }
    if (c->chunks == 0 && c->begun) {
        char more[FRAME_MAX];
        snprintf(more, sizeof more, ",%s", timings);
        put_frame(c, "", "\"stop\"", more);
        put_chunk(c, "data: [DONE]\n\n", 14);
        put(c, "0\r\n\r\n", 5);
        end_answer(c);
    }
}

/* False: the connection is gone. */
static bool go_on(struct connection *c) {
    do {
        if (c->state == ANSWERING) {
            make_frames(c);
        }
        if (!flush(c)) {
            return false;
        }
    } while (c->state == ANSWERING && c->streams && c->begun && c->gap == 0 && c->out_sent == c->out_len);
    if (c->out_sent == c->out_len) {
        want_writable(c, false);
        if (c->close && c->state == READ_HEAD) {
            shutdown(c->fd, SHUT_WR);
        }
    }
    return true;
}

static int64_t wish(const char *text, const char *name, int64_t otherwise) {
    char pattern[32];
    snprintf(pattern, sizeof pattern, " %s=", name);
    const char *end = strchr(text + 1, '@'), *found = strstr(text, pattern);
    return found != NULL && end != NULL && found < end ? atoll(found + strlen(pattern)) : otherwise;
}

static void begin_generation(struct connection *c) {
    c->peek[c->peek_len] = 0;
    const char *text = memmem(c->peek, c->peek_len, "@bench", 6);
    if (text == NULL) {
        text = "@bench @";
    }
    int64_t chunks = wish(text, "chunks", -1);
    c->id = wish(text, "id", -1);
    c->gap = (uint64_t) wish(text, "gap", 0) * 1000;
    c->streams = chunks >= 0;
    c->chunks = c->streams ? (uint64_t) chunks : 0;
    c->begun = c->phased = false;
    tasks++;
    set_timer(c, now_ns() + (uint64_t) wish(text, "delay", 0) * 1000);
    if (c->streams) {
        static const char head[] =
            "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: text/event-stream\r\n"
            "Transfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n";
        put(c, head, sizeof head - 1);
    }
}

static void put_slots(struct connection *c) {
    char *body = grown(NULL, (size_t) slots * 160 + 16), *at = body;
    for (int slot = 0; slot < slots; slot++) {
        at += sprintf(at, "%c{\"id\":%d,\"n_ctx\":131072,\"speculative\":false,\"is_processing\":false,"
            "\"id_task\":%llu,\"n_prompt_tokens\":4145,\"n_prompt_tokens_processed\":37}",
            slot == 0 ? '[' : ',', slot, (unsigned long long) tasks);
    }
    *at++ = ']';
    put_whole(c, "application/json; charset=utf-8", body, (size_t) (at - body));
    free(body);
}

/* Some proxies look for the file. */
static void save_slot(struct connection *c) {
    char name[128], path[4096];
    c->peek[c->peek_len] = 0;
    const char *found = strstr(c->peek, "\"filename\"");
    if (found == NULL || sscanf(found, "\"filename\" : \"%127[A-Za-z0-9._-]\"", name) != 1) {
        return;
    }
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    if (file != NULL) {
        fputs("slot", file);
        fclose(file);
    }
}

static void put_closed(struct connection *c) {
    char *body = grown(NULL, closed_count * 44 + 1), *at = body;
    for (size_t index = 0; index < closed_count; index++) {
        at += sprintf(at, "%lld %llu\n", (long long) closed_log[index].id, (unsigned long long) closed_log[index].at);
    }
    put_whole(c, "text/plain", body, (size_t) (at - body));
    closed_count = 0;
    free(body);
}

static void begin_answer(struct connection *c) {
    const char *target = strchr(c->head, ' ');
    target = target != NULL ? target + 1 : "";
    c->state = ANSWERING;
    c->id = -1;
    c->streams = false;
    if (c->generates) {
        begin_generation(c);
        return;
    }
    if (strncmp(target, "/slots/", 7) == 0) {
        if (strstr(c->head, "action=save") != NULL) {
            save_slot(c);
        }
        static const char saved[] = "{\"id_slot\":0,\"filename\":\"slot\",\"n_saved\":4145,\"n_written\":4145,"
            "\"n_restored\":4145,\"n_read\":4145}";
        put_whole(c, "application/json; charset=utf-8", saved, sizeof saved - 1);
    } else if (strncmp(target, "/slots", 6) == 0) {
        put_slots(c);
    } else if (strncmp(target, "/bench/closed", 13) == 0) {
        put_closed(c);
    } else if (strncmp(target, "/bench/tasks", 12) == 0) {
        char count[32];
        put_whole(c, "text/plain", count, (size_t) sprintf(count, "%llu", (unsigned long long) tasks));
    } else if (strncmp(target, "/props", 6) == 0) {
        char body[512];
        put_whole(c, "application/json; charset=utf-8", body, (size_t) snprintf(body, sizeof body,
            "{\"total_slots\":%d,\"build_info\":\"%s\",\"model_path\":\"local.gguf\","
            "\"default_generation_settings\":{\"n_ctx\":131072}}", slots, build));
    } else if (strncmp(target, "/v1/models", 10) == 0 || strncmp(target, "/models", 7) == 0) {
        static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"local\",\"object\":\"model\"}]}";
        put_whole(c, "application/json; charset=utf-8", models, sizeof models - 1);
    } else {
        put_whole(c, "application/json; charset=utf-8", "{\"status\":\"ok\"}", 15);
    }
    end_answer(c);
}

static void begin_body(struct connection *c) {
    const char *length = header(c->head, "content-length"), *encoding = header(c->head, "transfer-encoding");
    const char *connection = header(c->head, "connection");
    c->close = connection != NULL && strncasecmp(connection, "close", 5) == 0;
    c->generates = strncmp(c->head, "POST ", 5) == 0 && strncmp(c->head, "POST /slots/", 12) != 0;
    c->peek_len = 0;
    c->left = length != NULL ? strtoull(length, NULL, 10) : 0;
    c->line_len = 0;
    c->state = encoding != NULL ? READ_SIZE : READ_BODY;
}

/* How much of the data was used. */
static size_t take_head(struct connection *c, const char *data, size_t size) {
    size_t room = HEAD_MAX - 1 - c->head_len, before = c->head_len;
    if (room == 0) {
        fprintf(stderr, "stub: a head of more than %d bytes\n", HEAD_MAX);
        exit(1);
    }
    size = size < room ? size : room;
    memcpy(c->head + before, data, size);
    c->head_len += size;
    size_t from = before > 3 ? before - 3 : 0;
    char *end = memmem(c->head + from, c->head_len - from, "\r\n\r\n", 4);
    if (end == NULL) {
        return size;
    }
    c->head_len = (size_t) (end + 4 - c->head);
    c->head[c->head_len] = 0;
    begin_body(c);
    return c->head_len - before;
}

static size_t take_body(struct connection *c, const char *data, size_t size) {
    size = size < c->left ? size : (size_t) c->left;
    size_t room = PEEK_MAX - c->peek_len, kept = size < room ? size : room;
    memcpy(c->peek + c->peek_len, data, kept);
    c->peek_len += kept;
    c->left -= size;
    return size;
}

/* A line of chunk framing, without its end in `line`; `*whole` when it is there. */
static size_t take_line(struct connection *c, const char *data, size_t size, bool *whole) {
    for (size_t index = 0; index < size; index++) {
        if (data[index] == '\n') {
            c->line[c->line_len] = 0;
            c->line_len = 0;
            *whole = true;
            return index + 1;
        }
        if (data[index] != '\r' && c->line_len < sizeof c->line - 1) {
            c->line[c->line_len++] = data[index];
        }
    }
    return size;
}

static size_t take_framing(struct connection *c, const char *data, size_t size) {
    bool whole = false;
    size_t used = take_line(c, data, size, &whole);
    if (whole && c->state == READ_SIZE) {
        c->left = strtoull(c->line, NULL, 16);
        c->state = c->left != 0 ? READ_CHUNK : READ_TRAILER;
    } else if (whole && c->state == READ_CHUNK_END) {
        c->state = READ_SIZE;
    } else if (whole && c->line[0] == 0) {
        begin_answer(c);
    }
    return used;
}

static void take(struct connection *c, const char *data, size_t size) {
    while (size > 0 && c->state != ANSWERING) {
        size_t used = 0;
        switch (c->state) {
        case READ_HEAD:
            used = take_head(c, data, size);
            break;
        case READ_BODY:
        case READ_CHUNK:
            used = take_body(c, data, size);
            break;
        default:
            used = take_framing(c, data, size);
        }
        data += used;
        size -= used;
        if (c->state == READ_CHUNK && c->left == 0) {
            c->state = READ_CHUNK_END;
        } else if (c->state == READ_BODY && c->left == 0) {
            begin_answer(c);
        }
    }
}

static void serve(struct connection *c, uint32_t events) {
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
        for (;;) {
            ssize_t size = recv(c->fd, received, READ_MAX, 0);
            if (size == 0 || (size < 0 && errno != EAGAIN)) {
                hang_up(c);
                return;
            }
            if (size < 0) {
                break;
            }
            take(c, received, (size_t) size);
            if (size < READ_MAX) {
                break;
            }
        }
    }
    go_on(c);
}

static void accept_all(int listener) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK), on = 1;
        if (fd < 0) {
            return;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *c = calloc(1, sizeof *c);
        if (c == NULL) {
            perror("calloc");
            exit(1);
        }
        c->fd = fd;
        c->id = -1;
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static void run_timers(void) {
    uint64_t now = now_ns();
    for (size_t index = timed_count; index-- > 0;) {
        if (index < timed_count && timed[index]->next <= now && timed[index]->out_sent == timed[index]->out_len) {
            go_on(timed[index]);
        }
    }
}

static void arm_timer(void) {
    uint64_t first = UINT64_MAX;
    for (size_t index = 0; index < timed_count; index++) {
        const struct connection *c = timed[index];
        if (c->out_sent == c->out_len && c->next < first) {
            first = c->next;
        }
    }
    struct itimerspec when = {0};
    if (first != UINT64_MAX) {
        when.it_value.tv_sec = (time_t) (first / 1000000000u);
        when.it_value.tv_nsec = (long) (first % 1000000000u);
    }
    timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &when, NULL);
}

static int listen_on_loopback(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(listener, (struct sockaddr *) &address, size) < 0 || listen(listener, 4096) < 0) {
        perror("listen");
        exit(1);
    }
    getsockname(listener, (struct sockaddr *) &address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return listener;
}

int main(int count, char **arguments) {
    if (count != 4) {
        fprintf(stderr, "usage: stub SLOTS BUILD FOLDER\n");
        return 2;
    }
    slots = atoi(arguments[1]);
    build = arguments[2];
    folder = arguments[3];
    signal(SIGPIPE, SIG_IGN);
    epoll_fd = epoll_create1(0);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    int listener = listen_on_loopback();
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &listener};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);
    event.data.ptr = &timer_fd;
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer_fd, &event);
    for (;;) {
        struct epoll_event events[256];
        int ready = epoll_wait(epoll_fd, events, 256, -1);
        for (int index = 0; index < ready; index++) {
            void *what = events[index].data.ptr;
            if (what == &listener) {
                accept_all(listener);
            } else if (what == &timer_fd) {
                uint64_t expirations;
                if (read(timer_fd, &expirations, sizeof expirations) < 0 && errno != EAGAIN) {
                    perror("timerfd");
                }
            } else {
                serve(what, events[index].events);
            }
        }
        run_timers();
        arm_timer();
    }
}
