/* A load client that costs next to nothing: one thread, epoll, a closed loop on each connection.
 *
 *     load PORT CONNECTIONS SECONDS REQUESTS PATH BODY_FILE SESSION
 *
 * Sends the body to PATH on each of the connections, one request after the other, until the seconds are over or that
 * many requests are answered (0: no limit), then prints one JSON object: times in nanoseconds. Each connection is a
 * session of its own, also by what it says: #SESSION near the body's front becomes its number. A content frame has
 * T<nanoseconds>T in its text, the monotonic clock when it was made (see stub.c); from that comes its delay. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "http.h"

enum { HEAD_MAX = 65536, READ_MAX = 1 << 20, STAMP_DIGITS = 12, FRONT_MAX = 2048 };

enum state { READ_HEAD, READ_BODY, READ_TO_END, READ_SIZE, READ_CHUNK, READ_CHUNK_END, READ_TRAILER };

struct times {
    uint64_t *values;
    size_t count, size;
};

struct connection {
    int fd;
    bool sending;
    size_t sent; /* of request and body together */
    uint64_t since;
    char request[1024 + FRONT_MAX]; /* the head, and the body as far as it is this connection's own */
    size_t request_len;
    enum state state;
    char head[HEAD_MAX];
    size_t head_len;
    char line[64];
    size_t line_len;
    uint64_t left;
    bool close, ok, first;
    /* a time stamp that is being read */
    int digits; /* -1: outside */
    uint64_t stamp;
};

static int epoll_fd, port;
static const char *path, *front, *body; /* the body in two parts; the first has #SESSION at its end */
static size_t front_size, body_size;
static uint64_t started, stops_at, wanted, answered, failed, bytes;
static int active;
static struct times latencies, firsts, delays;
static char received[READ_MAX];

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t) time.tv_sec * 1000000000u + (uint64_t) time.tv_nsec;
}

static void add(struct times *times, uint64_t value) {
    if (times->count == times->size) {
        times->size = times->size * 2 + 1024;
        times->values = realloc(times->values, times->size * sizeof *times->values);
        if (times->values == NULL) {
            perror("realloc");
            exit(1);
        }
    }
    times->values[times->count++] = value;
}

static void fail(const char *what) {
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void watch(struct connection *c, bool writable) {
    struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0), .data.ptr = c};
    if (c->sending != writable) {
        c->sending = writable;
        epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
    }
}

static void open_connection(struct connection *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t) port)};
    int on = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c->fd, (struct sockaddr *) &address, sizeof address) < 0) {
        fail("connect");
    }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->sending = false;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
}

static void send_more(struct connection *c) {
    size_t whole = c->request_len + body_size;
    while (c->sent < whole) {
        struct iovec parts[2];
        struct msghdr message = {.msg_iov = parts};
        if (c->sent < c->request_len) {
            parts[message.msg_iovlen].iov_base = c->request + c->sent;
            parts[message.msg_iovlen++].iov_len = c->request_len - c->sent;
        }
        size_t of_body = c->sent > c->request_len ? c->sent - c->request_len : 0;
        parts[message.msg_iovlen].iov_base = (void *) (body + of_body);
        parts[message.msg_iovlen++].iov_len = body_size - of_body;
        ssize_t sent = sendmsg(c->fd, &message, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN) {
                watch(c, true);
                return;
            }
            return; /* the end is seen when reading */
        }
        c->sent += (size_t) sent;
    }
    watch(c, false);
}

static void begin_request(struct connection *c) {
    c->state = READ_HEAD;
    c->head_len = c->line_len = c->sent = 0;
    c->digits = -1;
    c->first = false;
    c->since = now_ns();
    send_more(c);
}

/* The answer is complete, or the connection broke. */
static void end_request(struct connection *c, bool whole) {
    uint64_t now = now_ns();
    if (whole && c->ok) {
        answered++;
        add(&latencies, now - c->since);
    } else {
        failed++;
        if (failed == 1) {
            fprintf(stderr, "load: first failure: %.300s\n", c->head_len > 0 ? c->head : "no answer");
        }
    }
    if (now >= stops_at || (wanted != 0 && answered + failed + (uint64_t) active > wanted)) {
        close(c->fd);
        active--;
        return;
    }
    if (!whole || c->close) {
        close(c->fd);
        open_connection(c);
    }
    begin_request(c);
}

static void read_stamps(struct connection *c, const char *data, size_t size) {
    for (size_t index = 0; index < size; index++) {
        char byte = data[index];
        if (c->digits < 0) {
            const char *next = memchr(data + index, 'T', size - index);
            if (next == NULL) {
                return;
            }
            index = (size_t) (next - data);
            c->digits = 0;
            c->stamp = 0;
        } else if (byte >= '0' && byte <= '9') {
            c->stamp = c->stamp * 10 + (uint64_t) (byte - '0');
            c->digits++;
        } else if (byte == 'T' && c->digits >= STAMP_DIGITS) {
            uint64_t now = now_ns();
            add(&delays, now - c->stamp);
            if (!c->first) {
                c->first = true;
                add(&firsts, now - c->since);
            }
            c->digits = -1;
        } else {
            c->digits = byte == 'T' ? 0 : -1;
            c->stamp = 0;
        }
    }
}

static void begin_body(struct connection *c) {
    const char *length = header(c->head, "content-length"), *encoding = header(c->head, "transfer-encoding");
    const char *connection = header(c->head, "connection");
    c->ok = strncmp(c->head + 8, " 200", 4) == 0;
    c->close = connection != NULL && strncasecmp(connection, "close", 5) == 0;
    c->left = length != NULL ? strtoull(length, NULL, 10) : 0;
    c->state = encoding != NULL ? READ_SIZE : length != NULL ? READ_BODY : READ_TO_END;
}

static size_t take_head(struct connection *c, const char *data, size_t size) {
    size_t room = HEAD_MAX - 1 - c->head_len, before = c->head_len;
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

/* Lines of chunk framing; `*over`: the answer is complete. */
static size_t take_framing(struct connection *c, const char *data, size_t size, bool *over) {
    for (size_t index = 0; index < size; index++) {
        if (data[index] != '\n') {
            if (data[index] != '\r' && c->line_len < sizeof c->line - 1) {
                c->line[c->line_len++] = data[index];
            }
            continue;
        }
        c->line[c->line_len] = 0;
        if (c->state == READ_SIZE) {
            c->left = strtoull(c->line, NULL, 16);
            c->state = c->left != 0 ? READ_CHUNK : READ_TRAILER;
        } else if (c->state == READ_CHUNK_END) {
            c->state = READ_SIZE;
        } else if (c->line_len == 0) {
            *over = true;
        }
        c->line_len = 0;
        return index + 1;
    }
    return size;
}

/* True: the answer is complete. */
static bool take(struct connection *c, const char *data, size_t size) {
    bool over = false;
    while (size > 0 && !over) {
        size_t used;
        if (c->state == READ_HEAD) {
            used = take_head(c, data, size);
            over = c->state == READ_BODY && c->left == 0;
        } else if (c->state == READ_BODY || c->state == READ_CHUNK || c->state == READ_TO_END) {
            used = c->state != READ_TO_END && size > c->left ? (size_t) c->left : size;
            read_stamps(c, data, used);
            if (c->state != READ_TO_END) {
                c->left -= used;
                over = c->state == READ_BODY && c->left == 0;
                c->state = c->state == READ_CHUNK && c->left == 0 ? READ_CHUNK_END : c->state;
            }
        } else {
            used = take_framing(c, data, size, &over);
        }
        data += used;
        size -= used;
    }
    return over;
}

static void serve(struct connection *c, uint32_t events) {
    if (events & EPOLLOUT) {
        send_more(c);
    }
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR))) {
        return;
    }
    ssize_t size = recv(c->fd, received, READ_MAX, 0);
    if (size < 0 && errno == EAGAIN) {
        return;
    }
    if (size <= 0) {
        end_request(c, size == 0 && c->state == READ_TO_END);
        return;
    }
    bytes += (uint64_t) size;
    if (take(c, received, (size_t) size)) {
        end_request(c, true);
    }
}

static int by_value(const void *one, const void *other) {
    uint64_t a = *(const uint64_t *) one, b = *(const uint64_t *) other;
    return (a > b) - (a < b);
}

static void print_times(const char *name, struct times *times) {
    qsort(times->values, times->count, sizeof *times->values, by_value);
    printf(",\"%s\":{\"count\":%zu", name, times->count);
    if (times->count > 0) {
        const uint64_t *values = times->values;
        printf(",\"p50\":%llu,\"p99\":%llu,\"max\":%llu", (unsigned long long) values[times->count / 2],
            (unsigned long long) values[times->count * 99 / 100], (unsigned long long) values[times->count - 1]);
    }
    printf("}");
}

static void map_body(const char *file) {
    struct stat status;
    int fd = open(file, O_RDONLY);
    if (fd < 0 || fstat(fd, &status) < 0) {
        fail(file);
    }
    body_size = (size_t) status.st_size;
    front = mmap(NULL, body_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, 0);
    if (front == MAP_FAILED) {
        fail(file);
    }
    const char *mark = memmem(front, body_size < FRONT_MAX ? body_size : FRONT_MAX, "#SESSION", 8);
    front_size = mark != NULL ? (size_t) (mark + 8 - front) : 0;
    body = front + front_size;
    body_size -= front_size;
}

static void prepare_request(struct connection *c, int number, const char *session) {
    c->request_len = (size_t) snprintf(c->request, 1024,
        "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
        "Authorization: Bearer sk-bench\r\nAccept: */*\r\nUser-Agent: bench\r\nX-Slotpin-Session: %s-%d\r\n"
        "Content-Length: %zu\r\n\r\n", path, port, session, number, front_size + body_size);
    if (front_size > 0) {
        char text[9];
        snprintf(text, sizeof text, "%08d", number % 100000000);
        memcpy(c->request + c->request_len, front, front_size - 8);
        memcpy(c->request + c->request_len + front_size - 8, text, 8);
        c->request_len += front_size;
    }
}

int main(int count, char **arguments) {
    if (count != 8) {
        fprintf(stderr, "usage: load PORT CONNECTIONS SECONDS REQUESTS PATH BODY_FILE SESSION\n");
        return 2;
    }
    port = atoi(arguments[1]);
    int connections = atoi(arguments[2]);
    wanted = strtoull(arguments[4], NULL, 10);
    path = arguments[5];
    map_body(arguments[6]);
    signal(SIGPIPE, SIG_IGN);
    epoll_fd = epoll_create1(0);
    struct connection **all = calloc((size_t) connections, sizeof *all);
    for (int number = 0; all != NULL && number < connections; number++) {
        struct connection *c = all[number] = calloc(1, sizeof *c);
        if (c == NULL) {
            fail("calloc");
        }
        prepare_request(c, number, arguments[7]);
        open_connection(c);
    }
    started = now_ns();
    stops_at = started + (uint64_t) (atof(arguments[3]) * 1e9);
    active = connections;
    for (int number = 0; number < connections; number++) {
        begin_request(all[number]);
    }
    while (active > 0) {
        struct epoll_event events[256];
        int ready = epoll_wait(epoll_fd, events, 256, 30000);
        if (ready == 0) {
            errno = ETIMEDOUT;
            fail("nothing came for 30 s");
        }
        for (int index = 0; index < ready; index++) {
            serve(events[index].data.ptr, events[index].events);
        }
    }
    printf("{\"seconds\":%.6f,\"answered\":%llu,\"failed\":%llu,\"bytes\":%llu", (double) (now_ns() - started) / 1e9,
        (unsigned long long) answered, (unsigned long long) failed, (unsigned long long) bytes);
    print_times("latency", &latencies);
    print_times("first", &firsts);
    print_times("delay", &delays);
    printf("}\n");
    return 0;
}
