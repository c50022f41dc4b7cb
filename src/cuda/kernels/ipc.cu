// Messages between ranks of a node, written straight into the memory of the receiver, which the sender has opened (CUDA
// IPC, or peer access within a process). Every rank runs three kernels for a round of messages, in the order of one stream:
//
//   post_receives  writes into the mailbox of each sender where its messages go. Waits for nothing.
//   put_messages   waits for what its receivers posted in this round, copies, and sets a flag for each block.
//   await_messages waits for the flags of the senders.
//
// No deadlock: a block waits only for posts, or for puts, of other ranks in the same round. Posts wait for nothing but
// earlier rounds; puts wait for posts alone. So by induction over the rounds each kernel ends, in whatever order the devices
// run them, if a kernel of another rank gets a multiprocessor. It does: a grid has few small blocks, which never fill a
// device, and the kernels of processes that share a device take turns by time slices.
//
// Flags hold the number of the round between these two ranks, so they are never reset. An entry of a mailbox is free again
// when its receiver has waited for the messages of the round, before it posts the next one.
//
// Waits end if `aborted`, pinned host memory of this rank, is set: another rank may have died.
#include "ptx.cuh"

#define MESSAGES 32         // most messages, and most ranks, of a launch
#define MOST_BLOCKS 32      // most blocks that send to one rank
#define POLLS_PER_CHECK 32  // polls of a flag for each of the host's memory, which is farther away

// An entry of a mailbox: where a message goes, as an offset in a block of the receiver's memory, whose number is in the
// highest bit.
struct Entry {
  unsigned long long offset;
  unsigned round, unused;
};

// A receive: an entry of the sender's mailbox, and its contents.
struct Receive {
  Entry* entry;
  Entry contents;
};
struct Receives {
  Receive receives[MESSAGES];
};

// A message, and the entry in which its receiver posts where it goes.
struct Put {
  const float* from;
  long long words;
  const Entry* entry;
};
// A rank that messages first..first+count go to, by `blocks` blocks; the blocks of its memory as this rank sees them, and
// its flags.
struct Receiver {
  unsigned long long memory[2];
  unsigned* flags;
  unsigned first, count, blocks, round;
};
struct Puts {
  Put messages[MESSAGES];
  Receiver receivers[MESSAGES];
};

// A rank that messages come from, by `blocks` blocks, and its flags.
struct Sender {
  const unsigned* flags;
  unsigned blocks, round;
};
struct Senders {
  Sender senders[MESSAGES];
};

// Waits until a flag has the number of the round. False if this rank was aborted.
__device__ __forceinline__ bool reached(const unsigned* flag, unsigned round, const unsigned* aborted) {
  for (unsigned polls = 1; load_acquire_sys(flag) != round; polls++)
    if (polls % POLLS_PER_CHECK == 0 && load_acquire_sys(aborted)) return false;
  return true;
}

// Copies words by a whole block, 16 bytes at a time if both addresses are equally aligned.
__device__ __forceinline__ void copy_words(const float* from, float* to, long long words) {
  const unsigned long long address = reinterpret_cast<unsigned long long>(from);
  if ((address ^ reinterpret_cast<unsigned long long>(to)) % 16) {
    for (long long i = threadIdx.x; i < words; i += blockDim.x) to[i] = from[i];
    return;
  }
  long long head = (16 - address % 16) % 16 / 4;
  if (head > words) head = words;
  const long long packs = (words - head) / 4, tail = head + 4 * packs;
  if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x];
  if (tail + threadIdx.x < words) to[tail + threadIdx.x] = from[tail + threadIdx.x];
  const float4* from4 = reinterpret_cast<const float4*>(from + head);
  float4* to4 = reinterpret_cast<float4*>(to + head);
  const long long step = blockDim.x;
  long long i = threadIdx.x;
  // Several loads are in flight in each thread.
  for (; i + 3 * step < packs; i += 4 * step) {
    const float4 a = from4[i], b = from4[i + step], c = from4[i + 2 * step], d = from4[i + 3 * step];
    to4[i] = a;
    to4[i + step] = b;
    to4[i + 2 * step] = c;
    to4[i + 3 * step] = d;
  }
  for (; i < packs; i += step) to4[i] = from4[i];
}

// Grid: one block of MESSAGES threads.
extern "C" __global__ void post_receives(Receives posts, int count) {
  if (threadIdx.x >= count) return;
  const Receive post = posts.receives[threadIdx.x];
  post.entry->offset = post.contents.offset;
  store_release_sys(&post.entry->round, post.contents.round);
}

// Grid: the blocks of all receivers, one after the other; block: at least MESSAGES threads.
extern "C" __global__ void put_messages(Puts puts, const unsigned* aborted) {
  __shared__ unsigned long long targets[MESSAGES];
  unsigned block = blockIdx.x, number = 0;
  while (block >= puts.receivers[number].blocks) block -= puts.receivers[number++].blocks;
  const Receiver to = puts.receivers[number];
  if (threadIdx.x < to.count) {
    const Entry* entry = puts.messages[to.first + threadIdx.x].entry;
    const bool posted = reached(&entry->round, to.round, aborted);
    const unsigned long long offset = posted ? entry->offset : 0;
    targets[threadIdx.x] = posted ? (offset >> 63 ? to.memory[1] : to.memory[0]) + (offset & ~(1ull << 63)) : 0;
  }
  __syncthreads();
  for (unsigned i = 0; i < to.count; i++) {
    if (!targets[i]) return;  // aborted
    const Put put = puts.messages[to.first + i];
    const long long begin = put.words / 4 * block / to.blocks * 4;
    const long long end = block + 1 == to.blocks ? put.words : put.words / 4 * (block + 1) / to.blocks * 4;
    copy_words(put.from + begin, reinterpret_cast<float*>(targets[i]) + begin, end - begin);
  }
  // Every thread's words are visible on all devices before the flag is.
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) store_release_sys(to.flags + block, to.round);
}

// Grid: one block.
extern "C" __global__ void await_messages(Senders from, int count, const unsigned* aborted) {
  for (int i = threadIdx.x; i < count * MOST_BLOCKS; i += blockDim.x) {
    const Sender sender = from.senders[i / MOST_BLOCKS];
    if (i % MOST_BLOCKS < sender.blocks && !reached(sender.flags + i % MOST_BLOCKS, sender.round, aborted)) return;
  }
}
