// Stands before MPI's functions for messages and counts those of at least LEAST bytes. A group is a time in which at least one
// of them is in flight.
#include <mpi.h>

#define LEAST 1024
#define MOST 4096

// Groups, sends, receives, and the most messages in flight at once.
static long counts[4];
static MPI_Request flying[MOST];
static int in_flight = 0;

static void begin(MPI_Request request, int bytes, int kind) {
  if (bytes < LEAST || in_flight == MOST) return;
  if (in_flight == 0) counts[0]++;
  counts[kind]++;
  flying[in_flight++] = request;
  if (in_flight > counts[3]) counts[3] = in_flight;
}

int MPI_Isend(const void* at, int n, MPI_Datatype t, int to, int tag, MPI_Comm c, MPI_Request* r) {
  int code = PMPI_Isend(at, n, t, to, tag, c, r);
  begin(*r, n, 1);
  return code;
}

int MPI_Irecv(void* at, int n, MPI_Datatype t, int from, int tag, MPI_Comm c, MPI_Request* r) {
  int code = PMPI_Irecv(at, n, t, from, tag, c, r);
  begin(*r, n, 2);
  return code;
}

int MPI_Test(MPI_Request* r, int* flag, MPI_Status* s) {
  MPI_Request request = *r;
  int code = PMPI_Test(r, flag, s);
  if (!*flag) return code;
  for (int i = 0; i < in_flight; i++) {
    if (flying[i] != request) continue;
    flying[i] = flying[--in_flight];
    break;
  }
  return code;
}

// Copies the counts since the last call.
void read_flights(long* to) {
  for (int i = 0; i < 4; i++) {
    to[i] = counts[i];
    counts[i] = 0;
  }
}
