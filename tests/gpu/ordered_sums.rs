//! Ordered sums over grouped NCCL messages: their cost, as the simulated NCCL counts it, and that
//! each stream wait is needed.
#![allow(clippy::undocumented_unsafe_blocks, reason = "calls of the simulator")]

use std::collections::BTreeSet;

use hpctrain::backend::cuda::{Cuda, CudaBuf, Device, Precision};
use hpctrain::backend::{Backend, ElementwiseOps, MemoryKind};
use hpctrain::comm::{
    Algorithm, Comm, DeviceTransport, Group, Operation, Pending, measure, start_threads_on_nodes,
};
use hpctrain::error::Result;

use hpctrain_testkit::simulator::{child, is_on_gpu, role, under};

/// Words of a slot; a chunk has eight.
const SLOT: usize = 60;
const CHUNK: usize = 8 * SLOT;

const TREE: Algorithm = Algorithm::HalvingDoubling;
const HIERARCHICAL: Algorithm = Algorithm::Hierarchical;

/// The counters that the simulated NCCL keeps for a device.
#[repr(C)]
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Counts {
    groups: u64,
    sends: u64,
    receives: u64,
    bytes_sent: u64,
    host_waits: u64,
}

/// Returns the counters since the last call.
fn counts(device: usize) -> Counts {
    type ReadCounts = unsafe extern "C" fn(i32, *mut Counts);
    let mut counts = Counts::default();
    unsafe {
        let library = libc::dlopen(c"libnccl.so.2".as_ptr(), libc::RTLD_NOW);
        assert!(!library.is_null());
        let read_counts = libc::dlsym(library, c"cudasim_nccl_counts".as_ptr());
        assert!(!read_counts.is_null());
        std::mem::transmute::<*mut libc::c_void, ReadCounts>(read_counts)(
            device as i32,
            &raw mut counts,
        );
    }
    counts
}

/// Returns values whose sum depends on the order of additions, and that differ from chunk to chunk.
fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + rank * 17 + 3) % 1009) as f32 * 0.37 - 150.0).collect()
}

/// Returns the sum of one element over the ranks, in the order of the tree.
fn tree_sum(mut terms: Vec<f32>) -> f32 {
    while terms.len() > 1 {
        terms = terms
            .chunks(2)
            .map(|pair| pair.iter().copied().reduce(|a, b| a + b).unwrap())
            .collect();
    }
    terms[0]
}

/// A rank with its own GPU.
struct Rank {
    comm: Comm<Cuda>,
    group: Group<Cuda>,
    cuda: Cuda,
}

impl Rank {
    /// Runs the collective `operation` on `len` elements of each rank. Returns true if this rank
    /// has the right bits.
    fn run(&self, operation: Operation, len: usize) -> bool {
        self.run_until(operation, len, 0, Pending::wait)
    }

    /// Runs a collective of other values in each `round`, as [`Rank::run`] does, and waits for it
    /// with `wait`.
    fn run_until(
        &self,
        operation: Operation,
        len: usize,
        round: usize,
        wait: fn(Pending<CudaBuf>) -> Result<CudaBuf>,
    ) -> bool {
        let group = &self.group;
        let rank = self.group.rank();
        let size = self.group.size();
        let values_here =
            self.cuda.upload(MemoryKind::Gradients, &values(rank + 5 * round, len)).unwrap();
        // Work of compute that the messages have to wait for.
        let mut buf = self.cuda.alloc(MemoryKind::Gradients, len).unwrap();
        self.cuda.copy(Cuda::all(&values_here), Cuda::all_mut(&mut buf)).unwrap();
        let buf = wait(group.run(operation, buf)).unwrap();
        let mut got = vec![0.0; len];
        self.cuda.download(Cuda::all(&buf), &mut got).unwrap();
        let all: Vec<_> = (0..size).map(|rank| values(rank + 5 * round, len)).collect();
        let own = rank * len / size..(rank + 1) * len / size;
        let (range, adds) = match operation {
            Operation::ReduceScatter => (own, true),
            Operation::Reduce => (if rank == 0 { 0..len } else { 0..0 }, true),
            Operation::AllReduce => (0..len, true),
            _ => (0..len, false),
        };
        let wanted = |i: usize| match adds {
            true => tree_sum(all.iter().map(|of_rank| of_rank[i]).collect()),
            false => all[i * size / len][i],
        };
        range.into_iter().all(|i| got[i].to_bits() == wanted(i).to_bits())
    }
}

/// Rounds to bf16, to nearest even.
fn rounded(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

impl Rank {
    /// Sums `len` elements of each rank in bf16. Returns true if this rank has the right bits: each
    /// level of the algorithm adds in f32 and rounds.
    fn sums_in_bf16(&self, operation: Operation, levels: &[&[&[usize]]], len: usize) -> bool {
        let rank = self.group.rank();
        let size = self.group.size();
        let here = self.cuda.upload(MemoryKind::Gradients, &values(rank, len)).unwrap();
        let mut buf = self.cuda.alloc_bf16(MemoryKind::Gradients, len).unwrap();
        self.cuda.copy(Cuda::all(&here), Cuda::all_mut(&mut buf)).unwrap();
        let buf = self.group.run(operation, buf).wait().unwrap();
        let mut got = vec![0.0; len];
        self.cuda.download(Cuda::all(&buf), &mut got).unwrap();
        let all: Vec<_> = (0..size).map(|rank| values(rank, len)).collect();
        let wanted = |i: usize| {
            let mut terms: Vec<_> = all.iter().map(|of_rank| rounded(of_rank[i])).collect();
            for level in levels {
                let sum = |ranks: &&[usize]| tree_sum(ranks.iter().map(|&r| terms[r]).collect());
                terms = level.iter().map(|ranks| rounded(sum(ranks))).collect();
            }
            terms[0]
        };
        let range = match operation {
            Operation::ReduceScatter => rank * len / size..(rank + 1) * len / size,
            _ => 0..len,
        };
        range.into_iter().all(|i| got[i].to_bits() == wanted(i).to_bits())
    }
}

/// Elements in bf16 are added in f32 and rounded once on each level; two go in a word.
#[test]
fn bf16_is_rounded_once_on_each_level() {
    under(&[&[("CUDASIM_DEVICES", "4")]], || {
        type Levels = &'static [&'static [&'static [usize]]];
        let shapes: [(Algorithm, &[usize], Levels); 4] = [
            (TREE, &[0; 2], &[&[&[0, 1]]]),
            (TREE, &[0; 3], &[&[&[0, 1, 2]]]),
            (TREE, &[0; 4], &[&[&[0, 1, 2, 3]]]),
            (HIERARCHICAL, &[0, 0, 1, 1], &[&[&[0, 1], &[2, 3]], &[&[0, 1]]]),
        ];
        for (algorithm, nodes, levels) in shapes {
            let ranks = nodes.len();
            for (operation, len) in [
                (Operation::AllReduce, 2 * CHUNK + 37),
                (Operation::AllReduce, 2),
                (Operation::ReduceScatter, 6 * CHUNK * ranks),
                (Operation::ReduceScatter, 2 * ranks),
            ] {
                let right = on_ranks(nodes, algorithm, |rank| {
                    let sent = rank.comm.stats().sent;
                    let right = rank.sums_in_bf16(operation, levels, len);
                    (right, rank.comm.stats().sent - sent)
                });
                let name = format!("{algorithm} {operation} of {len} on {ranks} ranks");
                assert!(right.iter().all(|(right, _)| *right), "{name}");
                let bytes: u64 = right.iter().map(|(_, bytes)| bytes).sum();
                let ways = if operation == Operation::AllReduce { 2 } else { 1 };
                let least = (ways * (ranks - 1) * len.next_multiple_of(2) * 2) as u64;
                // Debug builds compare calls, and communicators exchange their identifiers.
                assert!((least..least + 2000).contains(&bytes), "{name}: {bytes} of {least}");
            }
        }
    });
}

/// Returns the results of `body` on each rank of a new world of threads.
fn on_ranks<T: Send>(
    nodes: &[usize],
    algorithm: Algorithm,
    body: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    let rank = |comm: Comm<Cuda>| {
        let cuda =
            Cuda::new(&Device::open(comm.rank()).unwrap(), 128 << 20, Precision::Bf16).unwrap();
        let comm = comm.with_transport(DeviceTransport::Nccl).with_staging_chunk(SLOT);
        body(Rank { group: comm.world(), comm, cuda })
    };
    std::thread::scope(|scope| {
        let comms = start_threads_on_nodes::<Cuda>(nodes, algorithm).unwrap().into_iter();
        let ranks: Vec<_> = comms.map(|comm| scope.spawn(|| rank(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns the numbers of message groups and of messages that a rank sends, for a collective of
/// `chunks` chunks on `nodes` nodes of `per_node` ranks. If each rank has its own part of the
/// buffer, the parts of ranks with the same index on their nodes are in as many pieces as there are
/// nodes.
fn formula(
    algorithm: Algorithm,
    operation: Operation,
    [nodes, per_node]: [u64; 2],
    chunks: u64,
) -> [u64; 2] {
    let levels = if algorithm == HIERARCHICAL { 2 } else { 1 };
    let in_pieces = if operation == Operation::AllReduce { 1 } else { nodes };
    let once =
        if levels == 2 { (per_node - 1) * in_pieces + nodes - 1 } else { nodes * per_node - 1 };
    match operation {
        Operation::AllReduce => [chunks + 2 * levels - 1, chunks * 2 * once],
        _ => [chunks + levels - 1, chunks * once],
    }
}

const SHAPES: [(Algorithm, &[usize], [u64; 2]); 3] =
    [(TREE, &[0; 2], [1, 2]), (TREE, &[0; 4], [1, 4]), (HIERARCHICAL, &[0, 0, 1, 1], [2, 2])];

/// Groups, messages and bytes match the formulae, without host waits in between. The documentation
/// has the counts.
#[test]
fn groups_and_bytes_of_sums_are_counted() {
    if is_on_gpu() {
        return eprintln!("skipped: NCCL's stand-in counts");
    }
    under(
        &[&[("CUDASIM_DEVICES", "4")], &[("CUDASIM_DEVICES", "4"), ("CUDASIM_STREAMS", "lazy")]],
        || {
            let doc = include_str!("../../docs/parallelism.md");
            for (algorithm, nodes, shape) in SHAPES {
                let ranks = nodes.len() as u64;
                for operation in
                    [Operation::AllReduce, Operation::ReduceScatter, Operation::AllGather]
                {
                    let all = on_ranks(nodes, algorithm, |rank| {
                        // The communicator and memory for terms are there afterwards.
                        assert!(rank.run(operation, 2 * CHUNK));
                        [1, 2, 10].map(|chunks| {
                            counts(rank.group.rank());
                            assert!(
                                rank.run(operation, chunks * CHUNK),
                                "{algorithm} {operation} of {chunks} chunks"
                            );
                            (chunks as u64, counts(rank.group.rank()))
                        })
                    });
                    for (chunks, counts) in all.into_iter().flatten() {
                        let [groups, sends] = formula(algorithm, operation, shape, chunks);
                        let times = if operation == Operation::AllReduce { 2 } else { 1 };
                        let bytes_sent = times * (ranks - 1) * chunks * CHUNK as u64 * 4 / ranks;
                        let wanted =
                            Counts { groups, sends, receives: sends, bytes_sent, host_waits: 0 };
                        assert_eq!(
                            counts, wanted,
                            "{algorithm} {operation} of {chunks} chunks on {ranks} ranks"
                        );
                        let part = bytes_sent as f64 / (chunks * CHUNK as u64 * 4) as f64;
                        let row = format!(
                            "| {operation} | {algorithm} | {ranks} | {chunks} | {groups} | {sends} | {part} | {} |",
                            counts.host_waits
                        );
                        assert!(
                            doc.contains(&row.replace('_', "-")),
                            "docs/parallelism.md has no {row}"
                        );
                    }
                }
            }
            // Messages outside groups have the host wait: the count sees that.
            let pairs = on_ranks(&[0; 2], Algorithm::ReduceToOne, |rank| {
                counts(rank.group.rank());
                assert!((0..2).all(|_| rank.run(Operation::AllReduce, CHUNK)));
                counts(rank.group.rank())
            });
            assert!(
                pairs.iter().all(|counts| counts.groups > 2 && counts.host_waits > 0),
                "{pairs:?}"
            );
        },
    );
}

/// The terms of two chunks are held at most, and the estimate of memory counts them.
#[test]
fn terms_of_two_chunks_are_counted() {
    under(&[&[("CUDASIM_DEVICES", "4")]], || {
        for (algorithm, nodes, _) in SHAPES {
            on_ranks(nodes, algorithm, |rank| {
                let comm = &rank.comm;
                let ranks = nodes.len();
                let stats = rank.cuda.memory_stats();
                comm.count_memory(rank.cuda.clone());
                let terms = |chunks: usize| 4 * chunks * (ranks - 1) * CHUNK / ranks;
                for (chunks, places) in [(1, 1), (2, 2), (10, 2)] {
                    assert!(rank.run(Operation::AllReduce, chunks * CHUNK));
                    let held = stats.live(MemoryKind::Communication);
                    assert_eq!(
                        held,
                        terms(places),
                        "{chunks} chunks, {algorithm} on {ranks} ranks"
                    );
                }
                let more = comm.with_staging_chunk(2 * SLOT).staging()
                    - comm.with_staging_chunk(SLOT).staging();
                assert_eq!(more, terms(2), "{algorithm} on {ranks} ranks");
            });
        }
    });
}

/// Sums, and the number of stream waits of each on a rank's communication thread. The first one is
/// for compute.
const WAITED: [(Algorithm, &[usize], Operation, usize, usize); 4] = [
    (TREE, &[0; 2], Operation::AllReduce, 4, 8),
    (TREE, &[0; 2], Operation::ReduceScatter, 4, 8),
    (TREE, &[0; 4], Operation::AllReduce, 1, 3),
    (HIERARCHICAL, &[0, 0, 1, 1], Operation::AllReduce, 3, 8),
];

/// The number of the wait of compute for a sum, among the waits of the thread that computes: more
/// than those of any communication thread.
const WAIT_OF_COMPUTE: usize = 20;

/// Returns the numbers of waits that are omitted, one at a time, for a sum with `waits` waits: none,
/// each of the second of two such sums, one more than there are, and that of compute.
fn forgotten(waits: usize) -> impl Iterator<Item = usize> {
    [0].into_iter().chain(waits + 1..=2 * waits + 1).chain([WAIT_OF_COMPUTE])
}

/// Each stream wait is needed: without any one of them the device may add or send too early, as it
/// does if the simulator defers work without a wait, or lets other streams run ahead. With all of
/// them no such order changes a bit.
#[test]
fn a_sum_lacks_no_wait_and_has_none_too_many() {
    if is_on_gpu() {
        return eprintln!("skipped: a test of orders that the simulator chooses");
    }
    if role().is_some() {
        for (number, (algorithm, nodes, operation, chunks, waits)) in WAITED.into_iter().enumerate()
        {
            for forgotten in forgotten(waits) {
                // SAFETY: no other thread of this process is left that looks at the environment.
                unsafe { std::env::set_var("CUDASIM_FAIL", format!("wait:{forgotten}")) };
                let right = on_ranks(nodes, algorithm, |rank| {
                    // The host waits for compute before it takes memory for terms.
                    rank.run(operation, chunks * CHUNK);
                    // Each call has three waits, which nothing needs.
                    let copies = rank.cuda.copy_streams().unwrap().unwrap();
                    (0..WAIT_OF_COMPUTE / 3).for_each(|_| copies.after_compute().unwrap());
                    // Unless the wait of compute is to show, compute has nothing to wait for.
                    let wait = match forgotten {
                        WAIT_OF_COMPUTE => Pending::wait,
                        _ => Pending::synchronize,
                    };
                    rank.run_until(operation, chunks * CHUNK, 1, wait)
                });
                println!(
                    "\nsum {number} without {forgotten}: {}",
                    right.into_iter().all(|right| right)
                );
            }
        }
        return;
    }
    let mut wrong: [BTreeSet<usize>; WAITED.len()] = Default::default();
    for streams in ["lazy", "racing"] {
        let ended =
            child(&[("CUDASIM_DEVICES", "4"), ("CUDASIM_STREAMS", streams)], "forgets").succeeded();
        let lines: Vec<_> =
            ended.stdout.lines().filter_map(|line| line.strip_prefix("sum ")).collect();
        assert_eq!(
            lines.len(),
            WAITED.iter().map(|sum| forgotten(sum.4).count()).sum::<usize>(),
            "{ended}"
        );
        for line in lines {
            let (sum, (forgotten, right)) = line
                .split_once(" without ")
                .map(|(a, b)| (a, b.split_once(": ").unwrap()))
                .unwrap();
            if right == "false" {
                wrong[sum.parse::<usize>().unwrap()].insert(forgotten.parse().unwrap());
            }
        }
    }
    for (wrong, sum) in wrong.iter().zip(WAITED) {
        let needed = (sum.4 + 1..=2 * sum.4).chain([WAIT_OF_COMPUTE]);
        assert_eq!(*wrong, needed.collect(), "{sum:?}");
    }
}

/// The first messages over NCCL take long, which does not count against the time for measurements:
/// the largest unit is measured, too.
#[test]
fn a_slow_start_leaves_time_for_the_largest_unit() {
    const LARGEST: usize = 16 << 20;
    if is_on_gpu() {
        return eprintln!("skipped: NCCL's stand-in starts slowly");
    }
    under(&[&[("CUDASIM_DEVICES", "2"), ("CUDASIM_NCCL_START", "1")]], || {
        let measured = |comm: Comm<Cuda>| {
            let device = Device::open(comm.rank()).unwrap();
            let cuda = Cuda::new(&device, 256 << 20, Precision::Bf16).unwrap();
            let comm = comm.with_transport(DeviceTransport::Nccl);
            let world = comm.world();
            measure(&world, &world, &cuda, &[Operation::AllReduce], LARGEST, true).unwrap();
            comm.stats().sent
        };
        std::thread::scope(|scope| {
            let comms = start_threads_on_nodes::<Cuda>(&[0; 2], TREE).unwrap();
            let ranks: Vec<_> =
                comms.into_iter().map(|comm| scope.spawn(|| measured(comm))).collect();
            for rank in ranks {
                // Each of two ranks sends as much as it has: once to begin, and three times.
                let sent = rank.join().unwrap();
                assert!(sent >= 4 * LARGEST as u64, "{sent} bytes");
            }
        });
    });
}
