/* A tool that NVTX loads by NVTX_INJECTION64_PATH. It prints the ranges of domains: domain, message, payload. */

#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef void (*function)(void);

struct callbacks {
    size_t size;
    int (*table)(int module, function ***table, unsigned *size);
};

struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const char *message;
};

/* A domain, or a registered string, is its text. */
static const char *domain(const char *name) { return strdup(name); }
static const char *string(const char *domain, const char *text) { return strdup(text); }

static int push(const char *domain, const struct attributes *range) {
    printf("push %s: %s, %ld\n", domain, range->message, (long)range->payload);
    return 0;
}

static int pop(const char *domain) {
    printf("pop %s\n", domain);
    return 0;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const struct callbacks *callbacks = export_table(1);
    function **table;
    unsigned size;
    if (callbacks == NULL || !callbacks->table(5, &table, &size)) /* the module of domains */
        return 0;
    *table[4] = (function)push;
    *table[5] = (function)pop;
    *table[10] = (function)string;
    *table[12] = (function)domain;
    return 1;
}
