/* Constants of the MPI library that are macros: bindgen cannot see them. */
#include <mpi.h>

const void *const HPCTRAIN_MPI_IN_PLACE = MPI_IN_PLACE;
