// Stands before MPI's functions that are given elements: an address of a device's memory must come from a thread that has
// chosen a context, as MPI libraries look for it there. Counts such addresses, and says how many when MPI ends.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int seen = 0;

static void look(const void* at, const char* call) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  if (!driver || !at || at == MPI_IN_PLACE) return;
  int (*attribute)(void*, int, unsigned long long) = dlsym(driver, "cuPointerGetAttribute");
  int (*current)(void**) = dlsym(driver, "cuCtxGetCurrent");
  unsigned type = 0;
  void* context = NULL;
  if (attribute(&type, 2, (unsigned long long)at) || type != 2) return;  // no memory of a device
  seen++;
  if (!current(&context) && context) return;
  fprintf(stderr, "probe: %s of device memory on a thread without a context\n", call);
  abort();
}

int MPI_Isend(const void* at, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request* r) {
  look(at, "MPI_Isend");
  return PMPI_Isend(at, n, t, to, tag, c, r);
}
int MPI_Irecv(void* at, int n, MPI_Datatype t, int from, int tag, MPI_Comm c, MPI_Request* r) {
  look(at, "MPI_Irecv");
  return PMPI_Irecv(at, n, t, from, tag, c, r);
}
int MPI_Sendrecv(const void* at, int n, MPI_Datatype t, int to, int tag, void* in, int m, MPI_Datatype u, int from, int of,
                 MPI_Comm c, MPI_Status* s) {
  look(at, "MPI_Sendrecv");
  look(in, "MPI_Sendrecv");
  return PMPI_Sendrecv(at, n, t, to, tag, in, m, u, from, of, c, s);
}
int MPI_Allreduce(const void* at, void* in, int n, MPI_Datatype t, MPI_Op op, MPI_Comm c) {
  look(at, "MPI_Allreduce");
  look(in, "MPI_Allreduce");
  return PMPI_Allreduce(at, in, n, t, op, c);
}
int MPI_Finalize(void) {
  fprintf(stderr, "probe: %d addresses of a device\n", seen);
  return PMPI_Finalize();
}
