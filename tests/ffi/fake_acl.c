/* A libascendcl without an NPU: the functions that jtile calls of it, written down line by line. Memory of the device is
   memory of the host that no copy but these reaches; what a kernel does is a function that the test gives. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char text[1 << 16];
static size_t used;
static int fail_code, alive;
static char fail_name[64];
static void (*kernel)(const void *, int64_t, int32_t);

static void say(const char *format, ...) {
  va_list args;
  va_start(args, format);
  used += vsnprintf(text + used, sizeof text - used, format, args);
  va_end(args);
  if (used + 2 < sizeof text) text[used++] = '\n', text[used] = 0;
}

/* -- what tests call -- */

const char *fake_log(void) { return text; }
void fake_reset(void) { used = 0, text[0] = 0, fail_code = 0, fail_name[0] = 0; }
/* The next calls of this function give this error. */
void fake_fail(const char *function, int code) { strcpy(fail_name, function), fail_code = code; }
/* Takes the packed arguments, their bytes and the number of blocks. */
void fake_kernel(void (*run)(const void *, int64_t, int32_t)) { kernel = run; }
/* Allocations and streams that nobody has given back. */
int fake_alive(void) { return alive; }

/* -- libascendcl -- */

#define FAILING(function) \
  if (fail_code && !strcmp(function, fail_name)) return fail_code

int32_t aclInit(const char *config) { return say("init %d", config == NULL), 100002; }
const char *aclGetRecentErrMsg(void) { return "the fake says no"; }
int32_t aclrtSetDevice(int32_t device) {
  FAILING("aclrtSetDevice");
  return say("device %d", device), device < 2 ? 0 : 107001;
}
int32_t aclrtCreateStream(void **out) { return *out = (void *)77, ++alive, 0; }
int32_t aclrtDestroyStream(void *stream) { return --alive, stream == (void *)77 ? 0 : 1; }
int32_t aclrtMalloc(void **out, size_t bytes, int32_t policy) {
  FAILING("aclrtMalloc");
  *out = memset(malloc(bytes), 0x7f, bytes), ++alive;
  return say("malloc %zu policy %d", bytes, policy), 0;
}
int32_t aclrtFree(void *data) { return free(data), --alive, 0; }
int32_t aclrtMemcpy(void *to, size_t room, const void *from, size_t bytes, int32_t kind) {
  FAILING("aclrtMemcpy");
  memcpy(to, from, bytes);
  return say("copy %zu of %zu %s", bytes, room, kind == 1 ? "there" : kind == 2 ? "back" : "wrong"), 0;
}

struct option {
  int32_t type;
  uint32_t value[4];
};
struct options {
  struct option *options;
  size_t count;
};
int32_t aclrtBinaryLoadFromFile(const char *path, struct options *options, void **out) {
  FAILING("aclrtBinaryLoadFromFile");
  char start[64] = "";
  FILE *file = fopen(path, "rb");
  if (!file) return 500001;
  size_t n = fread(start, 1, sizeof start - 1, file);
  fclose(file);
  if (n < 4 || memcmp(start, "\177ELF", 4)) return 500002;
  *out = (void *)88;
  return say("load %s magic %x type %d x %zu", start + 4, options->options->value[0], options->options->type,
             options->count), 0;
}
int32_t aclrtBinaryUnLoad(void *binary) { return say("unload"), binary == (void *)88 ? 0 : 1; }
int32_t aclrtBinaryGetFunction(void *binary, const char *name, void **out) {
  FAILING("aclrtBinaryGetFunction");
  *out = (void *)99;
  return say("function %s", name), binary == (void *)88 ? 0 : 1;
}
int32_t aclrtGetHardwareSyncAddr(void **out) { return *out = (void *)0x5555, 0; }
int32_t aclrtLaunchKernelWithHostArgs(void *function, uint32_t blocks, void *stream, void *config, void *args,
                                      size_t bytes, void *places, size_t count) {
  FAILING("aclrtLaunchKernelWithHostArgs");
  if (function != (void *)99 || stream != (void *)77 || config || places || count) return 1;
  say("launch %u blocks, %zu bytes", blocks, bytes);
  if (kernel) kernel(args, (int64_t)bytes, (int32_t)blocks);
  return 0;
}
int32_t aclrtSynchronizeStream(void *stream) {
  FAILING("aclrtSynchronizeStream");
  return say("wait"), stream == (void *)77 ? 0 : 1;
}
