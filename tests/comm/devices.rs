//! Tests of communication of device memory: every transport gives the bits that host memory gives.

use std::ops::Range;
use std::path::Path;
use std::process::Command;

use hpctrain::backend::cpu::Cpu;
use hpctrain::backend::cuda::{Cuda, Device, Precision, devices};
use hpctrain::backend::{Backend, MemoryKind};
use hpctrain::comm::{
    Algorithm, AlgorithmTable, Comm, DeviceTransport, Group, TransportChoice, mpi, start_mpi,
    start_threads_on_nodes,
};
use hpctrain::error::{Error, Result};

use hpctrain_testkit::launch::{LIMIT, start};
use hpctrain_testkit::ranks::{self, is_rank_of, mpirun, mpirun_with};
use hpctrain_testkit::sealed::Sealed;
use hpctrain_testkit::simulator::{under, with_simulator};

const LENGTHS: [usize; 6] = [0, 1, 3, 7, 64, 1000];

/// Returns values whose sum depends on the order of additions.
fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + rank * 17 + 3) % 1009) as f32 * 0.37 - 150.0).collect()
}

/// A rank's group and device, and how to read its buffers after a message.
struct Rank<B: Backend> {
    group: Group<B>,
    backend: B,
    look: fn(&B, &B::Buf) -> Vec<f32>,
}

impl<B: Backend> Rank<B> {
    fn up(&self, what: MemoryKind, values: &[f32]) -> B::Buf {
        self.backend.upload(what, values).unwrap()
    }

    fn see(&self, buf: &B::Buf) -> Vec<f32> {
        if self.group.size() == 1 {
            // Without a message, compute may still use the buffer.
            let mut values = vec![0.0; B::len(buf)];
            self.backend.download(B::all(buf), &mut values).unwrap();
            return values;
        }
        (self.look)(&self.backend, buf)
    }

    /// Returns the results of every operation on buffers of one length, all in flight together.
    fn operations(&self, len: usize) -> Result<Vec<Vec<f32>>> {
        let group = &self.group;
        let rank = self.group.rank();
        let size = self.group.size();
        let padded = len.next_multiple_of(size);
        let part = rank * padded / size..(rank + 1) * padded / size;
        let mine = |part: &Range<usize>, of: &[f32]| {
            let mut mine = vec![f32::NAN; of.len()];
            mine[part.clone()].copy_from_slice(&of[part.clone()]);
            mine
        };
        let gradients = |values: Vec<f32>| self.up(MemoryKind::Gradients, &values);
        let whole = group.all_reduce(gradients(values(rank, len)), 0..len);
        let middle = group.all_reduce(gradients(values(rank, len)), len / 5..len - len / 7);
        let scattered = group.reduce_scatter(gradients(values(rank, padded)));
        let chained = group.reduce_scatter(gradients(values(rank, padded)));
        let chained = group.all_reduce_after(chained, part.clone());
        let reduced = group.reduce_scatter(gradients(values(rank, padded)));
        let reduced = group.reduce_after(reduced, part.clone());
        let gathered = group.all_gather(gradients(mine(&part, &values(8, padded))));
        let broadcast = group.broadcast(gradients(values(rank, len)), size - 1);

        // Whole numbers to 255 are the same in every format.
        let small = |rank: usize, len: usize| {
            (0..len).map(|i| ((i + rank) % 256) as f32).collect::<Vec<_>>()
        };
        let narrow = len.next_multiple_of(2 * size);
        let narrow_part = rank * narrow / size..(rank + 1) * narrow / size;
        let parameters = self.up(MemoryKind::Parameters, &mine(&narrow_part, &small(0, narrow)));
        let parameters = group.all_gather(parameters);
        let handed = self.up(MemoryKind::Parameters, &small(rank, narrow));
        let handed = group.all_gather_after(group.broadcast_range(handed, narrow_part), narrow);
        let odd = group.broadcast(self.up(MemoryKind::Parameters, &small(rank, len)), 0);

        let mut results: Vec<Vec<f32>> = Vec::new();
        for pending in [whole, middle] {
            results.push(self.see(&pending.wait()?));
        }
        for pending in [scattered, chained] {
            results.push(self.see(&pending.wait()?)[part.clone()].to_vec());
        }
        results.push(self.see(&reduced.wait()?)[if rank == 0 { part } else { 0..0 }].to_vec());
        for pending in [gathered, broadcast, parameters, handed, odd] {
            results.push(self.see(&pending.wait()?));
        }
        if size > 1 && len > 0 {
            let next = (rank + 1) % size;
            let previous = (rank + size - 1) % size;
            // Two receives are posted before the sends, one after.
            let receive = || group.recv(previous, gradients(vec![0.0; len]));
            let mut ready = vec![receive(), receive()];
            let sent: Vec<_> =
                (0..3).map(|i| group.send(next, gradients(values(rank + i, len)))).collect();
            ready.push(receive());
            for received in ready {
                results.push(self.see(&received.wait()?));
            }
            for sent in sent {
                results.push(self.see(&sent.wait()?));
            }
        }
        Ok(results)
    }
}

fn on_host(group: Group<Cpu>) -> Rank<Cpu> {
    Rank { group, backend: Cpu::new(1), look: |_, buf| buf.as_slice().to_vec() }
}

fn on_device(group: Group<Sealed>, shown: bool) -> Rank<Sealed> {
    Rank { group, backend: Sealed::new(shown), look: Sealed::look }
}

/// Opens a GPU of the simulator for a rank.
fn on_gpu(group: Group<Cuda>, number: usize) -> Rank<Cuda> {
    let backend = Cuda::new(&Device::open(number).unwrap(), 256 << 20, Precision::Bf16).unwrap();
    let look = |cuda: &Cuda, buf: &_| {
        let mut values = vec![0.0; Cuda::len(buf)];
        cuda.download(Cuda::all(buf), &mut values).unwrap();
        values
    };
    Rank { group, backend, look }
}

fn assert_same(what: &str, got: &[Vec<f32>], wanted: &[Vec<f32>], exact: bool) {
    assert_eq!(got.len(), wanted.len());
    for (request, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert_eq!(got.len(), wanted.len(), "{what}");
        for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
            let near = !exact && (got - wanted).abs() < 1e-3;
            assert!(
                near || got.to_bits() == wanted.to_bits(),
                "{what}, {request}, {i}: {got} for {wanted}"
            );
        }
    }
}

/// Returns the results of `rank` on each rank of a world of threads.
fn on_threads<B: Backend, T: Send>(
    nodes: &[usize],
    algorithm: Algorithm,
    rank: impl Fn(Comm<B>) -> T + Sync,
) -> Vec<T> {
    let rank = &rank;
    std::thread::scope(|scope| {
        let comms = start_threads_on_nodes::<B>(nodes, algorithm).unwrap().into_iter();
        let ranks: Vec<_> = comms.map(|comm| scope.spawn(move || rank(comm))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Compares host-staged operations in chunks of `chunks` words with host memory.
fn check_staged(nodes: &[usize], algorithm: Algorithm, lengths: &[usize], chunks: &[usize]) {
    for &len in lengths {
        let wanted = on_threads::<Cpu, _>(nodes, algorithm, |comm| {
            on_host(comm.world()).operations(len).unwrap()
        });
        for &chunk in chunks {
            let got = on_threads::<Sealed, _>(nodes, algorithm, |comm| {
                on_device(comm.with_staging_chunk(chunk).world(), false).operations(len).unwrap()
            });
            for (rank, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                let what =
                    format!("{algorithm} of {len} in chunks of {chunk}, rank {rank} on {nodes:?}");
                assert_same(&what, got, wanted, true);
            }
        }
    }
}

#[test]
fn staged_between_threads() {
    for algorithm in Algorithm::ALL.into_iter().filter(|&algorithm| algorithm != Algorithm::Vendor)
    {
        for nodes in [&[0][..], &[0, 0], &[0, 0, 0], &[0, 0, 0, 0], &[0, 0, 1, 1], &[0, 0, 1]] {
            check_staged(nodes, algorithm, &LENGTHS, &[1, 5, 16, 999, 1 << 20]);
        }
    }
}

/// Buffers longer than a block of the host's algorithms, so that chunks and blocks overlap.
#[test]
fn staged_blocks_between_threads() {
    for algorithm in [Algorithm::Ring, Algorithm::HalvingDoubling] {
        check_staged(&[0, 0], algorithm, &[1_100_001], &[100_000, 1 << 20]);
        check_staged(&[0, 0, 0], algorithm, &[1_100_000], &[1 << 20]);
    }
}

#[test]
fn every_way_over_mpi() {
    const NAME: &str = "devices::every_way_over_mpi";
    if !is_rank_of(NAME) {
        for (ranks, per_node) in [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2)] {
            let (status, printed) = mpirun(NAME, ranks, per_node, 120);
            assert!(status.success(), "{ranks} ranks, {per_node} per node:\n{printed}");
        }
        return;
    }
    let comm = start_mpi::<Cpu>(Algorithm::HalvingDoubling).unwrap();
    for algorithm in Algorithm::ALL {
        let table = AlgorithmTable::uniform(algorithm);
        let host = on_host(comm.world().with_algorithms(table.clone()));
        let exact = algorithm != Algorithm::Vendor;
        let device = |comm: Comm<Sealed>, shown| {
            on_device(comm.world().with_algorithms(table.clone()), shown)
        };
        let staged = comm.on::<Sealed>().with_transport(DeviceTransport::HostStaged);
        let ways = [
            ("staged", device(staged.clone(), false)),
            ("staged in chunks", device(staged.with_staging_chunk(60), false)),
            ("direct", device(comm.on().with_transport(DeviceTransport::CudaAware), true)),
        ];
        for len in LENGTHS.into_iter().chain([300_000, 1_200_001]) {
            let wanted = host.operations(len).unwrap();
            for (way, rank) in
                ways.iter().filter(|(way, _)| len < 2000 || *way != "staged in chunks")
            {
                assert_same(
                    &format!("{algorithm} {way} of {len}"),
                    &rank.operations(len).unwrap(),
                    &wanted,
                    exact,
                );
            }
        }
        // The number of slots that unsent messages hold depends on timing.
        for (way, rank) in ways.iter().filter(|(way, _)| *way == "direct") {
            let stats = rank.backend.memory_stats();
            let fresh = stats.system_allocs();
            rank.operations(1000).unwrap();
            assert_eq!(
                stats.system_allocs(),
                fresh,
                "{way} allocates memory for a repeated operation"
            );
        }
    }
    comm.shutdown();
}

/// Returns the groups, sends and receives of long messages since the last call, and the most that
/// were in flight at once, as `flights.c` counts them.
fn flights() -> [i64; 4] {
    type ReadFlights = unsafe extern "C" fn(*mut i64);
    let mut counts = [0; 4];
    // SAFETY: the preloaded library has a function of this name and type, which writes four numbers.
    unsafe {
        let read_flights = libc::dlsym(libc::RTLD_DEFAULT, c"read_flights".as_ptr());
        assert!(!read_flights.is_null());
        std::mem::transmute::<*mut libc::c_void, ReadFlights>(read_flights)(counts.as_mut_ptr());
    }
    counts
}

/// Over CUDA-aware MPI the messages of a group are in flight together, so a chunk of an all-reduce
/// takes two groups for each level of the algorithm.
#[test]
fn cuda_aware_messages_of_a_group_fly_together() {
    const NAME: &str = "devices::cuda_aware_messages_of_a_group_fly_together";
    if !is_rank_of(NAME) {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("flights.so");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/comm/flights.c");
        let built = Command::new("mpicc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status();
        assert!(built.unwrap().success());
        for per_node in [4, 2] {
            let preload = [("LD_PRELOAD", library.to_str().unwrap())];
            let (status, printed) = mpirun_with(NAME, 4, per_node, 120, &preload);
            assert!(status.success(), "{per_node} ranks per node:\n{printed}");
        }
        return;
    }
    let comm = start_mpi::<Sealed>(Algorithm::HalvingDoubling).unwrap();
    let comm = comm.with_transport(DeviceTransport::CudaAware);
    for algorithm in [Algorithm::HalvingDoubling, Algorithm::Hierarchical] {
        // With one node, hierarchical is halving-doubling.
        let is_deep = algorithm == Algorithm::Hierarchical && comm.world().nodes() == 2;
        let (levels, peers) = if is_deep { (2, 2) } else { (1, 3) };
        let table = AlgorithmTable::uniform(algorithm);
        // The default chunks have 32 MiB; those of slots of 1,024 words have 32 KiB.
        let of_slots = comm.with_staging_chunk(1 << 10);
        for (comm, chunks, len) in
            [(&comm, 1, 2 << 20), (&of_slots, 1, 1 << 13), (&of_slots, 10, 10 << 13)]
        {
            let rank = on_device(comm.world().with_algorithms(table.clone()), true);
            let terms = rank.up(MemoryKind::Gradients, &values(comm.rank(), len));
            flights();
            rank.group.all_reduce(terms, 0..len).wait().unwrap();
            let [groups, sends, receives, together] = flights();
            let messages = 2 * chunks * peers;
            assert_eq!(
                [groups, sends, receives],
                [chunks + 2 * levels - 1, messages, messages],
                "{algorithm} of {chunks} chunks"
            );
            assert!(chunks > 1 || together == 2 * messages / groups, "{algorithm}: {together}");
        }
    }
    comm.shutdown();
}

/// Simulator settings that expose missing waits, and accesses to device memory from the host.
const LATE: &[(&str, &str)] =
    &[("CUDASIM_DEVICES", "4"), ("CUDASIM_STREAMS", "lazy"), ("CUDASIM_HOST_ACCESS", "0")];

/// NCCL's collectives give almost the same sums, ours the same bits.
#[test]
fn nccl_between_threads() {
    under(&[&[("CUDASIM_DEVICES", "4")], LATE], || {
        for nodes in [&[0][..], &[0, 0], &[0, 0, 0], &[0, 0, 1, 1], &[0, 0, 1]] {
            for algorithm in Algorithm::ALL {
                let vendor = algorithm == Algorithm::Vendor;
                let tree = Algorithm::HalvingDoubling;
                let ours = if vendor { tree } else { algorithm };
                let host = |comm: Comm<Cpu>| {
                    LENGTHS.map(|len| on_host(comm.world()).operations(len).unwrap())
                };
                let wanted = on_threads(nodes, ours, host);
                let got = on_threads(nodes, algorithm, |comm: Comm<Cuda>| {
                    let rank =
                        on_gpu(comm.with_transport(DeviceTransport::Nccl).world(), comm.rank());
                    assert_eq!(rank.group.algorithms(false).len(), Algorithm::ALL.len());
                    LENGTHS.map(|len| rank.operations(len).unwrap())
                });
                for (rank, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                    for ((got, wanted), len) in got.iter().zip(wanted).zip(LENGTHS) {
                        assert_same(
                            &format!("{algorithm} of {len}, rank {rank} on {nodes:?}"),
                            got,
                            wanted,
                            !vendor,
                        );
                    }
                }
            }
        }
    });
}

/// Ranks that write to each other's memory have the bits of host memory, on a device each or on one
/// that they share, in every order of streams.
#[test]
fn cuda_ipc_between_threads() {
    const DEVICES: (&str, &str) = ("CUDASIM_DEVICES", "4");
    under(
        &[
            &[DEVICES, ("CUDASIM_HOST_ACCESS", "0")],
            &[("CUDASIM_DEVICES", "1"), ("CUDASIM_STREAMS", "racing")],
            LATE,
            &[DEVICES, ("CUDASIM_ORDER", "reverse")],
        ],
        || {
            for nodes in [&[0][..], &[0; 2], &[0; 3], &[0; 4]] {
                for algorithm in Algorithm::ALL {
                    if algorithm == Algorithm::Vendor {
                        continue;
                    }
                    let host = |comm: Comm<Cpu>| {
                        LENGTHS.map(|len| on_host(comm.world()).operations(len).unwrap())
                    };
                    let wanted = on_threads(nodes, algorithm, host);
                    let got = on_threads(nodes, algorithm, |comm: Comm<Cuda>| {
                        let group = comm.with_transport(DeviceTransport::CudaIpc).world();
                        assert!(!group.algorithms(false).contains(&Algorithm::Vendor));
                        let rank = on_gpu(group, comm.rank() % devices().unwrap());
                        LENGTHS.map(|len| rank.operations(len).unwrap())
                    });
                    for (rank, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                        for ((got, wanted), len) in got.iter().zip(wanted).zip(LENGTHS) {
                            let what = format!("{algorithm} of {len}, rank {rank} on {nodes:?}");
                            assert_same(&what, got, wanted, true);
                        }
                    }
                }
            }
        },
    );
}

#[test]
fn nccl_in_chunks_between_threads() {
    const DEVICES: (&str, &str) = ("CUDASIM_DEVICES", "5");
    under(
        &[&[DEVICES], &[DEVICES, ("CUDASIM_STREAMS", "lazy"), ("CUDASIM_HOST_ACCESS", "0")]],
        || {
            for nodes in [&[0; 2][..], &[0; 3], &[0; 4], &[0; 5]] {
                sums_in_chunks(nodes, DeviceTransport::Nccl);
            }
        },
    );
}

#[test]
fn cuda_ipc_in_chunks_between_threads() {
    const DEVICES: (&str, &str) = ("CUDASIM_DEVICES", "5");
    under(
        &[
            &[DEVICES, ("CUDASIM_STREAMS", "lazy"), ("CUDASIM_HOST_ACCESS", "0")],
            &[DEVICES, ("CUDASIM_STREAMS", "racing")],
        ],
        || {
            for nodes in [&[0; 3][..], &[0; 4]] {
                sums_in_chunks(nodes, DeviceTransport::CudaIpc);
            }
        },
    );
}

/// Tree sums in groups of messages, in many chunks, have the bits of host memory and send the fewest
/// bytes.
fn sums_in_chunks(nodes: &[usize], transport: DeviceTransport) {
    let ranks = nodes.len();
    // A chunk has eight slots: parts of a chunk, and many.
    for (slot, lengths) in
        [(1, [3, 7, 64, 200]), (5, [7, 64, 333, 1000]), (60, [3, 64, 1000, 4099])]
    {
        let host =
            |comm: Comm<Cpu>| lengths.map(|len| on_host(comm.world()).operations(len).unwrap());
        let wanted = on_threads(nodes, Algorithm::HalvingDoubling, host);
        let got = on_threads(nodes, Algorithm::HalvingDoubling, |comm: Comm<Cuda>| {
            let comm = comm.with_transport(transport).with_staging_chunk(slot);
            let rank = on_gpu(comm.world(), comm.rank());
            let results = lengths.map(|len| rank.operations(len).unwrap());
            // A rank sends all terms but those of its own share, and its share of the
            // sum to each other rank.
            let len = 10 * 8 * slot * ranks;
            let sent = |len: usize| {
                let terms = rank.up(MemoryKind::Gradients, &values(comm.rank(), len));
                let before = rank.group.stats().sent;
                rank.group.all_reduce(terms, 0..len).wait().unwrap();
                rank.group.stats().sent - before
            };
            // Debug builds also compare the requests.
            let sent = sent(len) - sent(0);
            (results, sent)
        });
        for (rank, ((got, sent), wanted)) in got.iter().zip(&wanted).enumerate() {
            for (got, wanted) in got.iter().zip(wanted) {
                assert_same(
                    &format!("chunks of {slot} slots, rank {rank} of {ranks}"),
                    got,
                    wanted,
                    true,
                );
            }
            let share = 10 * 8 * slot as u64;
            let even = (8 * slot).is_multiple_of(ranks);
            assert!(
                !even || *sent == 4 * 2 * (ranks as u64 - 1) * share,
                "rank {rank} of {ranks}: {sent}"
            );
        }
    }
}

/// Ranks are processes, and buffers are longer than one message.
#[test]
fn nccl_over_mpi() {
    const NAME: &str = "devices::nccl_over_mpi";
    if !is_rank_of(NAME) {
        for ranks in [2, 3] {
            let mut command = ranks::command(NAME, ranks, 2);
            let ended =
                start(with_simulator(&mut command).envs(LATE.iter().copied())).finish(2 * LIMIT);
            assert!(ended.status.success(), "{ranks} ranks: {ended}");
        }
        return;
    }
    let comm = start_mpi::<Cpu>(Algorithm::HalvingDoubling).unwrap();
    let gpu = on_gpu(comm.on().with_transport(DeviceTransport::Nccl).world(), comm.rank());
    for algorithm in Algorithm::ALL {
        let table = AlgorithmTable::uniform(algorithm);
        let host = on_host(comm.world().with_algorithms(table.clone()));
        let device = Rank {
            group: gpu.group.with_algorithms(table),
            backend: gpu.backend.clone(),
            look: gpu.look,
        };
        for len in [7, 1_200_001] {
            let got = device.operations(len).unwrap();
            let wanted = host.operations(len).unwrap();
            assert_same(
                &format!("{algorithm} of {len}"),
                &got,
                &wanted,
                algorithm != Algorithm::Vendor,
            );
        }
        let fresh = device.backend.memory_stats().system_allocs();
        device.operations(7).unwrap();
        assert_eq!(
            device.backend.memory_stats().system_allocs(),
            fresh,
            "a repeated operation allocates memory"
        );
    }
    comm.shutdown();
}

/// Processes that open each other's memory (CUDA IPC) have the bits of host memory, on a device each
/// or on one that they share.
#[test]
fn cuda_ipc_over_mpi() {
    const NAME: &str = "devices::cuda_ipc_over_mpi";
    if !is_rank_of(NAME) {
        let racing: &[(&str, &str)] = &[("CUDASIM_DEVICES", "1"), ("CUDASIM_STREAMS", "racing")];
        for (ranks, sim) in [(2, LATE), (3, racing), (4, &[("CUDASIM_DEVICES", "4")])] {
            let mut command = ranks::command(NAME, ranks, ranks);
            let ended =
                start(with_simulator(&mut command).envs(sim.iter().copied())).finish(2 * LIMIT);
            // Memory is closed by all ranks before one frees it.
            let is_clean = !ended.stderr.contains("which process");
            assert!(ended.status.success() && is_clean, "{ranks} ranks: {ended}");
        }
        return;
    }
    let comm = start_mpi::<Cpu>(Algorithm::HalvingDoubling).unwrap();
    let gpus = devices().unwrap();
    let group = comm.on().with_transport(DeviceTransport::CudaIpc).world();
    let gpu = on_gpu(group, comm.rank() % gpus);
    for algorithm in Algorithm::ALL.into_iter().filter(|&other| other != Algorithm::Vendor) {
        let table = AlgorithmTable::uniform(algorithm);
        let host = on_host(comm.world().with_algorithms(table.clone()));
        let device = Rank {
            group: gpu.group.with_algorithms(table),
            backend: gpu.backend.clone(),
            look: gpu.look,
        };
        for len in [7, 300_001] {
            let got = device.operations(len).unwrap();
            assert_same(
                &format!("{algorithm} of {len}"),
                &got,
                &host.operations(len).unwrap(),
                true,
            );
        }
    }
    comm.shutdown();
}

/// A rank that waits on its device for one that has ended is ended, too: its kernels stop.
#[test]
fn an_abort_ends_kernels_that_wait() {
    under(&[&[("CUDASIM_DEVICES", "2")]], || {
        let errors = on_threads::<Cuda, _>(&[0; 2], Algorithm::HalvingDoubling, |comm| {
            let group = comm.with_transport(DeviceTransport::CudaIpc).world();
            let rank = on_gpu(group, comm.rank());
            rank.operations(7).unwrap();
            if comm.rank() == 1 {
                let aborts = std::panic::AssertUnwindSafe(|| comm.abort(3));
                assert!(std::panic::catch_unwind(aborts).is_err());
                return String::new();
            }
            let pending = rank.group.all_reduce(rank.up(MemoryKind::Gradients, &[1.0; 8]), 0..8);
            let error = pending.synchronize().err().unwrap().to_string();
            // Nothing is left in the streams that could wait for ever.
            drop(rank);
            error
        });
        assert!(errors[0].contains("aborted"), "{errors:?}");
    });
}

/// A rank on which NCCL fails says why, and the one that waits for its message is ended, too.
#[test]
fn a_failure_of_nccl_ends_all() {
    const NAME: &str = "devices::a_failure_of_nccl_ends_all";
    if !is_rank_of(NAME) {
        let mut command = ranks::command(NAME, 2, 2);
        let ended = start(with_simulator(&mut command).env("CUDASIM_DEVICES", "2")).finish(LIMIT);
        assert!(ended.status.code() == Some(3) && ended.stderr.contains("as it should"), "{ended}");
        return;
    }
    let comm = start_mpi::<Cuda>(Algorithm::HalvingDoubling).unwrap();
    let rank = on_gpu(comm.with_transport(DeviceTransport::Nccl).world(), comm.rank());
    rank.operations(7).unwrap();
    if comm.rank() == 1 {
        // SAFETY: other threads access the environment only through the standard library's lock.
        unsafe { std::env::set_var("CUDASIM_FAIL", "nccl") };
    }
    let error = rank.operations(7).unwrap_err();
    assert_eq!(comm.rank(), 1, "{error}");
    let message = error.to_string();
    let words = ["NCCL could not exchange a message: ", ": a failure was asked for\nhint: "];
    assert!(error.exit_code() == 1 && words.iter().all(|word| message.contains(word)), "{message}");
    eprintln!("as it should");
    comm.abort(3);
}

/// Pairs of bf16 are sent as words, which must not be added.
#[test]
fn only_f32_is_added() {
    on_threads::<Sealed, _>(&[0, 0], Algorithm::HalvingDoubling, |comm| {
        let rank = on_device(comm.world(), false);
        let sum = rank.group.all_reduce(rank.up(MemoryKind::Parameters, &[1.0; 8]), 0..8).wait();
        assert_eq!(sum.err().unwrap().to_string(), "all_reduce requires f32 elements");
    });
}

/// An abort of another rank reaches a rank whose device hangs.
#[test]
fn an_abort_reaches_a_rank_that_waits_for_its_device() {
    let errors = on_threads::<Sealed, _>(&[0, 0], Algorithm::HalvingDoubling, |comm| {
        let rank = on_device(comm.world(), false);
        if comm.rank() == 0 {
            rank.backend.hang();
        }
        let pending = rank.group.all_reduce(rank.up(MemoryKind::Gradients, &[1.0; 8]), 0..8);
        if comm.rank() == 1 {
            let aborts = std::panic::AssertUnwindSafe(|| comm.abort(3));
            assert!(std::panic::catch_unwind(aborts).is_err());
        }
        pending.wait().err().unwrap().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("aborted with code 3")), "{errors:?}");
}

/// Staging memory is counted and reused. Posted messages hold a slot for each of their chunks until
/// they complete: three messages of ten chunks in each direction.
#[test]
fn staging_is_counted_and_bounded() {
    const SLOTS: usize = 2 * 3 * 10;
    on_threads::<Sealed, _>(&[0, 0, 0], Algorithm::HalvingDoubling, |comm| {
        let comm = comm.with_staging_chunk(100);
        let rank = on_device(comm.world(), false);
        comm.count_memory(rank.backend.clone());
        let stats = rank.backend.memory_stats();
        for _ in 0..8 {
            rank.operations(1000).unwrap();
            let slots = stats.system_allocs();
            let bytes = stats.live(MemoryKind::Communication);
            assert!((3..=SLOTS).contains(&slots), "{slots} slots");
            assert!(
                (slots * 400..slots * 400 + 400).contains(&bytes),
                "{slots} slots in {bytes} bytes"
            );
        }
    });
}

#[test]
fn routes_are_found() {
    on_threads::<Sealed, _>(&[0, 0], Algorithm::HalvingDoubling, |comm| {
        let way = |route| {
            comm.select_transport(route, || unreachable!("threads are not probed"))
                .map(|comm| comm.device_transport())
        };
        assert_eq!(
            (way(TransportChoice::HostStaged).unwrap(), way(TransportChoice::Auto).unwrap()),
            (Some(DeviceTransport::HostStaged), Some(DeviceTransport::HostStaged))
        );
        let error = way(TransportChoice::CudaAware).unwrap_err().to_string();
        assert!(
            error.contains("threads of one process cannot send from GPU memory")
                && error.contains("comm.transport = host-staged")
        );
        let error = way(TransportChoice::Nccl).unwrap_err().to_string();
        assert!(
            error.contains("comm.transport = nccl: there is no collective library (such as NCCL)"),
            "{error}"
        );
        // Device addresses without MPI are errors, not crashes.
        let group = comm.with_transport(DeviceTransport::CudaAware).world();
        let backend = Sealed::new(false);
        let sum = group
            .all_reduce(backend.upload(MemoryKind::Gradients, &[1.0; 8]).unwrap(), 0..8)
            .wait();
        assert!(
            sum.err().unwrap().to_string().contains("comm.transport = cuda-aware requires MPI")
        );
    });
    on_threads::<Cpu, _>(&[0], Algorithm::HalvingDoubling, |comm| {
        assert_eq!(
            comm.select_transport(TransportChoice::Auto, || Ok(())).unwrap().device_transport(),
            None
        );
        let error = comm.select_transport(TransportChoice::CudaAware, || Ok(())).err().unwrap();
        assert!(
            error.exit_code() == 2
                && error.to_string().contains("comm.transport = cuda-aware is for GPUs"),
            "{error}"
        );
    });
}

/// CUDA-aware MPI is probed in child processes, which crash on memory that MPI cannot access.
#[test]
fn cuda_aware_mpi_is_probed() {
    const NAME: &str = "devices::cuda_aware_mpi_is_probed";
    const DEVICE: &str = "HPCTRAIN_TEST_DEVICE";
    // An option of the test program that changes nothing.
    const CHILD: &str = "--test-threads=3";
    let device = std::env::var(DEVICE).unwrap_or_default();
    if is_rank_of(NAME) && std::env::args().any(|argument| argument == CHILD) {
        // One of the two probe processes.
        let probed = match device.as_str() {
            "shown" => mpi::run_cuda_probe(|_| Ok(Sealed::new(true))),
            "hidden" => mpi::run_cuda_probe(|_| Ok(Sealed::new(false))),
            _ => mpi::run_cuda_probe(|_| Ok(Cpu::new(1))),
        };
        return probed.unwrap_or_else(|e| {
            eprintln!("error: {e}");
            std::process::exit(2)
        });
    }
    if is_rank_of(NAME) {
        let comm = start_mpi::<Sealed>(Algorithm::HalvingDoubling).unwrap();
        let prove = || {
            assert_eq!(comm.rank(), 0, "one rank of a node runs the probe");
            let processes = mpi::probe_in_child(&[NAME, "--exact", "--nocapture", CHILD])?;
            assert_eq!(processes, 2, "the probe exchanges memory between processes");
            Ok(())
        };
        let found = comm
            .select_transport(TransportChoice::CudaAware, prove)
            .map(|comm| comm.device_transport());
        match device.as_str() {
            "shown" => assert_eq!(found.unwrap(), Some(DeviceTransport::CudaAware)),
            "hidden" => {
                let error = found.unwrap_err().to_string();
                assert!(
                    error.contains("signal")
                        && error.contains("hint: set comm.transport = host-staged"),
                    "{error}"
                );
            }
            _ => assert!(found.unwrap_err().to_string().contains("there is no GPU"), "{device}"),
        }
        // Debian's library does not claim to be CUDA-aware, so it is not probed.
        let never = || Err(Error::internal("probed"));
        assert_eq!(
            comm.select_transport(TransportChoice::Auto, never).unwrap().device_transport(),
            Some(DeviceTransport::HostStaged)
        );
        comm.shutdown();
        return;
    }
    for device in ["shown", "hidden", "none"] {
        let (status, printed) = mpirun_with(NAME, 2, 2, 100, &[(DEVICE, device)]);
        assert!(status.success(), "{device}:\n{printed}");
    }
}
