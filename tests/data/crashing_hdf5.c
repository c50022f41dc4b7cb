/* Ends each process that opens a dataset of an HDF5 file, as libhdf5 does on some damaged files. */

#include <stdint.h>

int64_t H5Dopen2(int64_t place, const char *name, int64_t access)
{
    (void)place, (void)name, (void)access;
    *(volatile int *)0 = 0;
    return -1;
}
