/* A host in C: the library that it links leaves the host its own malloc and operator new. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <kvasir.h>
#include <stdio.h>
#include <string.h>

static int provided_by(const char* function, const char* library) {
  Dl_info place;
  void* address = dlsym(RTLD_DEFAULT, function);
  if (!address || !dladdr(address, &place) || !strstr(place.dli_fname, library)) {
    printf("%s is not the one of %s but of %s\n", function, library,
           address ? place.dli_fname : "nobody");
    return 0;
  }
  return 1;
}

int main(void) {
  int good = kv_version() == KV_VERSION_NUMBER;
  if (!good) printf("kv_version is %u, the header says %u\n", kv_version(), KV_VERSION_NUMBER);
  good &= provided_by("malloc", "libc.so");
  good &= provided_by("free", "libc.so");
  good &= provided_by("posix_memalign", "libc.so");
  good &= provided_by("_Znwm", "libstdc++.so");
  good &= provided_by("_ZdlPv", "libstdc++.so");
  return good ? 0 : 1;
}
