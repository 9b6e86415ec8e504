// What both programs read of a message's head.

#include <string.h>
#include <strings.h>

// The value of a header, by its name in lower case; NULL where there is none. `head` ends with an empty line.
static const char *header(const char *head, const char *name) {
    size_t size = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line != NULL && line[2] != '\r'; line = strstr(line + 2, "\r\n")) {
        if (strncasecmp(line + 2, name, size) == 0 && line[2 + size] == ':') {
            const char *value = line + 3 + size;
            return value + strspn(value, " \t");
        }
    }
    return NULL;
}
