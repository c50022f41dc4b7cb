// Stands before an MPI library that was built without CUDA, and says that it knows it: memory of the simulator can be read by
// any library.
int MPIX_Query_cuda_support(void) { return 1; }
