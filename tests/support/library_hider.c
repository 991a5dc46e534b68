// Loaded in front of a program (LD_PRELOAD), it lets a machine that has MPI and NVIDIA's libraries
// look like one that has none of them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

static int hidden = 0;

void* dlopen(const char* name, int flags) {
  static void* (*real)(const char*, int) = NULL;
  static const char* const kHidden[] = {"libmpi", "libnccl", "libcudnn", "libcublas"};
  if (real == NULL) real = (void* (*)(const char*, int))dlsym(RTLD_NEXT, "dlopen");
  hidden = 0;
  for (size_t n = 0; name != NULL && n < sizeof(kHidden) / sizeof(*kHidden); ++n) {
    if (strstr(name, kHidden[n]) != NULL) hidden = 1;
  }
  return hidden ? NULL : real(name, flags);
}

char* dlerror(void) {
  static char* (*real)(void) = NULL;
  if (real == NULL) real = (char* (*)(void))dlsym(RTLD_NEXT, "dlerror");
  return hidden ? (char*)"hidden by tests/support/library_hider.c" : real();
}
