/* A driver without a GPU: what jtile calls of libcuda and libamdhip64, written down line by line. Device memory is host
   memory. Devices 0 and 1 are of sm_90 and gfx942, device 2 is of sm_80 and gfx1100; tests may ask for more of sm_90. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *text;
static size_t used, room;
static int fail_code, fail_device = -1, encodes, devices = 3;
static char fail_name[64], signature[600];
static void *kernel_to;
static const void *kernel_from;
static size_t kernel_bytes;
static __thread void *contexts[8];
static __thread int depth;
static int alive; /* allocations */
static int blocks_each = 2, far = -1, without_atomics = -1; /* of a multiprocessor; devices that others cannot reach */

static void say(const char *format, ...) {
  char line[8192];
  va_list args;
  va_start(args, format);
  int n = vsnprintf(line, sizeof line, format, args);
  va_end(args);
  pthread_mutex_lock(&lock);
  if (used + n + 2 > room) text = realloc(text, room = 2 * (used + n + 2));
  memcpy(text + used, line, n + 1);
  used += n;
  text[used++] = '\n', text[used] = 0;
  pthread_mutex_unlock(&lock);
}

/* -- what tests call -- */

const char *fake_log(void) { return text ? text : ""; }
void fake_reset(void) {
  devices = 3, blocks_each = 2, far = without_atomics = fail_device = -1;
  used = 0, fail_code = 0, fail_name[0] = signature[0] = 0, kernel_bytes = 0, encodes = 0;
  if (text) text[0] = 0;
}
/* The next calls of this function give this error. */
void fake_fail(const char *function, int code) { strcpy(fail_name, function), fail_code = code; }
/* The same, on one device only; -1: on all. */
void fake_fail_on(int device) { fail_device = device; }
void fake_devices(int count) { devices = count; }
/* How many blocks a multiprocessor holds, the device that others cannot reach, and that without atomics. */
void fake_links(int blocks, int unreached, int atomics) { blocks_each = blocks, far = unreached, without_atomics = atomics; }
/* A letter for each parameter of kernels: p a pointer, i 32 bits, l 64 bits, m a tensor map. */
void fake_signature(const char *letters) { strcpy(signature, letters); }
/* What a kernel does: these bytes go there. */
void fake_kernel(void *to, const void *from, size_t bytes) { kernel_to = to, kernel_from = from, kernel_bytes = bytes; }
void fake_log_clear(void) {
  used = 0;
  if (text) text[0] = 0;
}
int fake_depth(void) { return depth; }
int fake_alive(void) { return alive; }

/* -- shared by both drivers -- */

static int current(void) { return depth ? (int)((uintptr_t)contexts[depth - 1] - 140) : -1; }
static int failing(const char *function) {
  return fail_code && !strcmp(function, fail_name) && (fail_device < 0 || fail_device == current()) ? fail_code : 0;
}
#define FAILING(function) \
  if (failing(function)) return failing(function)

static void say_params(char *out, size_t size, void **params) {
  size_t n = 0;
  for (size_t k = 0; signature[k]; ++k) {
    if (signature[k] == 'p') n += snprintf(out + n, size - n, " %llu", *(unsigned long long *)params[k]);
    if (signature[k] == 'i') n += snprintf(out + n, size - n, " %d", *(int32_t *)params[k]);
    if (signature[k] == 'l') n += snprintf(out + n, size - n, " %lld", *(long long *)params[k]);
    if (signature[k] == 'm')
      n += snprintf(out + n, size - n, " map(%llu,%d)", *(unsigned long long *)params[k],
                    (uintptr_t)params[k] % 64 == 0);
  }
  if (kernel_bytes) memcpy(kernel_to, kernel_from, kernel_bytes);
}

static int load(const char *who, void **module, const char *image) {
  static uintptr_t next = 100;
  *module = (void *)__sync_fetch_and_add(&next, 1);
  say("%s %s", who, image + 64);
  return 0;
}

static int find(void **function, void *module, const char *name) {
  if (strncmp(name, "jtile_", 6)) return 500;
  *function = (void *)((uintptr_t)module + 1000);
  say("function %s", name);
  return 0;
}

/* -- libcuda -- */

int cuInit(unsigned flags) { return flags; }
int cuGetErrorName(int code, const char **out) {
  static char name[32];
  *out = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : (snprintf(name, sizeof name, "CUDA_ERROR_%d", code), name);
  return 0;
}
int cuGetErrorString(int code, const char **out) { return *out = code == 2 ? "out of memory" : "it did not work", 0; }
int cuDeviceGet(int *out, int ordinal) { return *out = ordinal + 40, ordinal < devices ? 0 : 101; }
int cuDeviceGetName(char *out, int size, int device) { return snprintf(out, size, "Fake %d", device - 40), 0; }
int cuDeviceGetAttribute(int *out, int attribute, int device) {
  int old = device == 42;
  *out = attribute == 16 ? 4 : attribute == 75 ? (old ? 8 : 9) : attribute == 76 ? 0 : attribute == 97 ? (old ? 166912 : 232448) : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **out, int device) { return *out = (void *)(uintptr_t)(device + 100), 0; }
int cuCtxGetCurrent(void **out) { return *out = depth ? contexts[depth - 1] : NULL, 0; }
int cuCtxPushCurrent_v2(void *context) { return contexts[depth++] = context, 0; }
int cuCtxPopCurrent_v2(void **out) { return *out = contexts[--depth], 0; }

int cuModuleLoadData(void **module, const void *image) {
  FAILING("cuModuleLoadData");
  char who[32];
  snprintf(who, sizeof who, "load on %d:", current());
  return load(who, module, image);
}
int cuModuleUnload(void *module) { return (void)module, say("unload on %d", current()), 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { return find(function, module, name); }
int cuFuncSetAttribute(void *function, int attribute, int value) {
  FAILING("cuFuncSetAttribute");
  return (void)function, say("attribute %d = %d", attribute, value), 0;
}
int cuFuncLoad(void *function) { return (void)function, say("ready"), 0; }
int cuMemAlloc_v2(uint64_t *out, size_t bytes) {
  FAILING("cuMemAlloc");
  *out = (uint64_t)(uintptr_t)memset(aligned_alloc(256, (bytes + 255) / 256 * 256), 0x7f, bytes);
  __sync_fetch_and_add(&alive, 1);
  return say("allocate %zu on %d", bytes, current()), 0;
}
int cuMemFree_v2(uint64_t data) {
  return free((void *)(uintptr_t)data), __sync_fetch_and_sub(&alive, 1), say("free on %d", current()), 0;
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream) {
  say("memset %llu %d x %zu stream %zu on %d", (unsigned long long)to, value, bytes, (size_t)stream, current());
  return memset((void *)to, value, bytes), 0;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
  say("read %zu stream %zu on %d", bytes, (size_t)stream, current());
  return memcpy(to, (void *)from, bytes), 0;
}
int cuStreamSynchronize(void *stream) {
  FAILING("cuStreamSynchronize");
  return say("wait %zu", (size_t)stream), 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
  say("write %zu stream %zu on %d", bytes, (size_t)stream, current());
  return memcpy((void *)to, from, bytes), 0;
}
int cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
  FAILING("cuMemHostAlloc");
  *out = memset(malloc(bytes), 0x7f, bytes), __sync_fetch_and_add(&alive, 1);
  return say("host %zu flags %u", bytes, flags), 0;
}
int cuMemFreeHost(void *data) { return free(data), __sync_fetch_and_sub(&alive, 1), say("free host"), 0; }
int cuCtxSynchronize(void) {
  FAILING("cuCtxSynchronize");
  return say("idle %d", current()), 0;
}
int cuStreamCreateWithPriority(void **out, unsigned flags, int priority) {
  *out = malloc(1);
  return say("stream flags %u on %d", flags, current()), priority;
}
int cuEventCreate(void **out, unsigned flags) {
  *out = malloc(1);
  return say("event flags %u on %d", flags, current()), 0;
}
int cuEventRecord(void *event, void *stream) { return (void)event, (void)stream, say("record on %d", current()), 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  return (void)stream, (void)event, say("await on %d", current()), (int)flags;
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) {
  say("copy %zu on %d", bytes, current());
  return memcpy((void *)to, (const void *)from, bytes), (void)stream, 0;
}
int cuDeviceCanAccessPeer(int *out, int device, int peer) { return *out = peer - 40 != far, (void)device, 0; }
int cuDeviceGetP2PAttribute(int *out, int attribute, int from, int to) {
  return *out = attribute == 3 && to - 40 != without_atomics, (void)from, 0;
}
int cuCtxEnablePeerAccess(void *context, unsigned flags) {
  static __thread int before; /* XLA has done it for some */
  say("reach %d from %d", (int)((uintptr_t)context - 140), current());
  return flags ? 1 : ++before % 2 ? 0 : 704;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, void *function, int threads, size_t shared) {
  return *out = blocks_each, (void)function, say("room for blocks of %d with %zu", threads, shared), 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int now = 1;
  int old = now;
  return now = *mode, *mode = old, 0;
}
int cuTensorMapEncodeTiled(uint64_t *out, int dtype, uint32_t rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  FAILING("cuTensorMapEncodeTiled");
  char line[512];
  int n = snprintf(line, sizeof line, "encode %llu dtype %d dims", (unsigned long long)(uintptr_t)address, dtype);
  for (uint32_t k = 0; k < rank; ++k) n += snprintf(line + n, sizeof line - n, " %llu", (unsigned long long)dims[k]);
  n += snprintf(line + n, sizeof line - n, " strides");
  for (uint32_t k = 0; k + 1 < rank; ++k)
    n += snprintf(line + n, sizeof line - n, " %llu", (unsigned long long)strides[k]);
  n += snprintf(line + n, sizeof line - n, " box");
  for (uint32_t k = 0; k < rank; ++k) n += snprintf(line + n, sizeof line - n, " %u x %u", box[k], steps[k]);
  say("%s modes %d %d %d %d", line, interleave, swizzle, promotion, fill);
  memset(out, 0, 128);
  out[0] = (uint64_t)address;
  return 0;
}

struct attribute {
  unsigned id, pad;
  int value[16];
};
struct config {
  unsigned grid[3], block[3], shared;
  void *stream;
  struct attribute *attributes;
  unsigned count;
};
int cuLaunchKernelEx(const struct config *how, void *function, void **params, void **extra) {
  FAILING("cuLaunchKernelEx");
  char line[4096] = "", list[256] = "";
  say_params(line, sizeof line, params);
  for (unsigned k = 0, n = 0; k < how->count; ++k) {
    const struct attribute *a = &how->attributes[k];
    n += snprintf(list + n, sizeof list - n, " %u:%d", a->id, a->value[0]);
    if (a->id == 4) n += snprintf(list + n, sizeof list - n, "x%dx%d", a->value[1], a->value[2]);
  }
  say("launch %ux%ux%u blocks of %ux%ux%u shared %u stream %zu attributes%s on %d args%s%s", how->grid[0], how->grid[1],
      how->grid[2], how->block[0], how->block[1], how->block[2], how->shared, (size_t)how->stream, list, current(),
      *line ? line : " -", (uintptr_t)function > 1000 && !extra ? "" : " wrong");
  return 0;
}

/* -- libamdhip64 -- */

static __thread int hip_device;
int hipInit(unsigned flags) { return flags; }
const char *hipGetErrorName(int code) { return code == 2 ? "hipErrorOutOfMemory" : "hipErrorOther"; }
const char *hipGetErrorString(int code) { return code == 2 ? "out of memory" : "it did not work"; }
int hipGetDevicePropertiesR0600(char *out, int ordinal) {
  if (ordinal >= 3) return 101;
  memset(out, 0, 1472);
  sprintf(out, "Fake %d", ordinal);
  uint64_t shared = 65536;
  memcpy(out + 296, &shared, 8);
  strcpy(out + 1160, ordinal == 2 ? "gfx1100" : "gfx942:sramecc+:xnack-");
  return 0;
}
int hipGetDevice(int *out) { return *out = hip_device, 0; }
int hipSetDevice(int device) { return hip_device = device, 0; }
int hipModuleLoadData(void **module, const void *image) {
  FAILING("hipModuleLoadData");
  char who[32];
  snprintf(who, sizeof who, "load on %d:", hip_device);
  return load(who, module, image);
}
int hipModuleUnload(void *module) { return (void)module, say("unload on %d", hip_device), 0; }
int hipModuleGetFunction(void **function, void *module, const char *name) { return find(function, module, name); }
static int hip_launch(const char *how, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **params) {
  char line[4096] = "";
  say_params(line, sizeof line, params);
  say("%s %ux%ux%u blocks of %ux%ux%u shared %u stream %zu on %d args%s", how, gx, gy, gz, bx, by, bz, shared,
      (size_t)stream, hip_device, *line ? line : " -");
  return 0;
}
int hipModuleLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **params, void **extra) {
  FAILING("hipModuleLaunchKernel");
  return hip_launch(f && !extra ? "launch" : "wrong", gx, gy, gz, bx, by, bz, shared, stream, params);
}
int hipModuleLaunchCooperativeKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                     unsigned bz, unsigned shared, void *stream, void **params) {
  return hip_launch(f ? "launch together" : "wrong", gx, gy, gz, bx, by, bz, shared, stream, params);
}
int hipMalloc(void **out, size_t bytes) {
  FAILING("hipMalloc");
  *out = memset(malloc(bytes), 0x7f, bytes), ++alive;
  return say("allocate %zu on %d", bytes, hip_device), 0;
}
int hipFree(void *data) { return free(data), --alive, say("free on %d", hip_device), 0; }
int hipMemsetD8Async(void *to, unsigned char value, size_t bytes, void *stream) {
  say("memset %zu %d x %zu stream %zu on %d", (size_t)to, value, bytes, (size_t)stream, hip_device);
  return memset(to, value, bytes), 0;
}
int hipMemcpyDtoHAsync(void *to, const void *from, size_t bytes, void *stream) {
  say("read %zu stream %zu on %d", bytes, (size_t)stream, hip_device);
  return memcpy(to, from, bytes), 0;
}
int hipThreadExchangeStreamCaptureMode(int *mode) { return cuThreadExchangeStreamCaptureMode(mode); }
int hipStreamSynchronize(void *stream) { return say("wait %zu", (size_t)stream), 0; }
