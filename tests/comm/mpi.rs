//! Tests of communication over MPI: each test starts this program again under `mpirun`.

use std::process::Command;
use std::time::Duration;

use hpctrain::backend::cpu::{Cpu, CpuBuf};
use hpctrain::backend::{Backend, MemoryKind};
use hpctrain::comm::{
    Algorithm, AlgorithmTable, Comm, Group, Operation, Pending, TermOrder, UnequalCollective,
    start_mpi, start_threads_on_nodes,
};
use hpctrain::error::{Error, Result};

use hpctrain_testkit::launch;
use hpctrain_testkit::ranks::{ROLE, is_rank_of, mpirun, mpirun_with};

/// Checks that a test passes with all ranks on one node, in pairs, and one per node: through shared
/// memory, through both, and through MPI messages.
fn passes(test: &str, ranks: usize) {
    for ranks_per_node in [ranks, 2, 1] {
        let (status, printed) = mpirun(test, ranks, ranks_per_node, 60);
        assert!(status.success(), "{test} on {ranks} ranks, {ranks_per_node} per node:\n{printed}");
    }
}

fn buf(values: &[f32]) -> CpuBuf {
    Cpu::new(1).upload(MemoryKind::Gradients, values).unwrap()
}

/// Returns values whose sum depends on the order of additions.
fn values(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 31 + rank * 17 + 3) % 1009) as f32 * 0.37 - 150.0).collect()
}

/// Returns the sum of `len` elements over ranks of which the first has two terms, on every rank.
fn one_term_more(ranks: usize, len: usize) -> UnequalCollective {
    let mut terms: Vec<Vec<_>> =
        (0..ranks).map(|rank| std::iter::once(rank..rank + 1).collect()).collect();
    terms[0].push(ranks..ranks + 1);
    UnequalCollective {
        len,
        parts: (0..ranks).map(|rank| rank * len / ranks..(rank + 1) * len / ranks).collect(),
        terms: Some(TermOrder::new(&terms).into()),
        all_gathers: vec![(0..ranks).collect()],
    }
}

/// Returns the results of every operation on this rank, for several lengths.
fn every_operation(group: &Group<Cpu>) -> Result<Vec<Vec<f32>>> {
    let rank = group.rank();
    let size = group.size();
    let mut results = Vec::new();
    for len in [0, 1, 3, 7, 64, 1000, 300_000_usize] {
        let padded = len.next_multiple_of(size);
        let part = rank * padded / size..(rank + 1) * padded / size;
        // All requests are in flight together.
        let whole = group.all_reduce(buf(&values(rank, len)), 0..len);
        let middle = group.all_reduce(buf(&values(rank, len)), len / 5..len - len / 7);
        let reduced = group.reduce(buf(&values(rank, len)));
        let scattered = group.reduce_scatter(buf(&values(rank, padded)));
        let mut mine = vec![f32::NAN; padded];
        mine[part.clone()].copy_from_slice(&values(8, padded)[part.clone()]);
        let gathered = group.all_gather(buf(&mine));
        let broadcast = group.broadcast(buf(&values(rank, len)), size - 1);
        results.extend([whole.wait()?, middle.wait()?].map(|buf| buf.as_slice().to_vec()));
        results.push(reduced.wait()?.as_slice()[..if rank == 0 { len } else { 0 }].to_vec());
        results.push(scattered.wait()?.as_slice()[part.clone()].to_vec());
        // The first rank has a term more, the last one of the sum.
        let terms = if rank == 0 { 2 } else { 1 };
        let mine = values(rank, terms * padded);
        let sum = group.unequal(Pending::ready(buf(&mine)), one_term_more(size, padded));
        results.push(sum.wait()?.as_slice()[..if size > 1 { padded } else { 0 }].to_vec());
        results.extend([gathered.wait()?, broadcast.wait()?].map(|buf| buf.as_slice().to_vec()));
    }
    Ok(results)
}

/// Returns the results of `rank` on threads.
fn on_threads(ranks: usize, rank: usize, algorithm: Algorithm) -> Vec<Vec<f32>> {
    let run = |comm: Comm<Cpu>| std::thread::spawn(move || every_operation(&comm.world()).unwrap());
    let division = std::env::var("HPCTRAIN_RANKS_PER_NODE").unwrap();
    let per_node: usize = division.trim_end_matches(",cyclic").parse().unwrap();
    let nodes: Vec<usize> = (0..ranks).map(|rank| rank / per_node).collect();
    let ranks: Vec<_> =
        start_threads_on_nodes::<Cpu>(&nodes, algorithm).unwrap().into_iter().map(run).collect();
    ranks.into_iter().map(|rank| rank.join().unwrap()).nth(rank).unwrap()
}

/// Compares every operation with the same on threads. The vendor's collectives are compared
/// approximately with halving-doubling.
fn check_operations(algorithm: Algorithm) {
    let comm = start_mpi::<Cpu>(algorithm).unwrap();
    let rank = comm.rank();
    let size = comm.size();
    let started: usize = std::env::var("OMPI_COMM_WORLD_SIZE").unwrap().parse().unwrap();
    assert_eq!((size, comm.node().local_size, comm.node().local_rank), (started, size, rank));
    assert!(comm.library().starts_with("Open MPI v"), "{}", comm.library());
    let alone = std::env::var("HPCTRAIN_RANKS_PER_NODE").unwrap() == "1";
    assert!(alone || size == 1 || rank == size - 1 || comm.shares_memory());
    assert!(!(alone && comm.shares_memory()));
    let got = every_operation(&comm.world()).unwrap();
    let reference =
        if algorithm == Algorithm::Vendor { Algorithm::HalvingDoubling } else { algorithm };
    for (got, wanted) in got.iter().zip(on_threads(size, rank, reference)) {
        assert_eq!(got.len(), wanted.len());
        for (got, wanted) in got.iter().zip(wanted) {
            let near = algorithm == Algorithm::Vendor && (got - wanted).abs() < 1e-3;
            assert!(near || got.to_bits() == wanted.to_bits(), "{algorithm}: {got} for {wanted}");
        }
    }

    let world = comm.world();
    let gathered = world.gather_bytes(vec![rank as u8; 3 * rank]).wait().unwrap();
    assert_eq!(gathered, (0..size).map(|rank| vec![rank as u8; 3 * rank]).collect::<Vec<_>>());
    let lone = if rank + 1 == size { Err(Error::input("bad")) } else { Ok(()) };
    let message =
        if size == 1 { "bad".into() } else { format!("rank {rank}: bad", rank = size - 1) };
    assert_eq!(world.all_ok(lone).unwrap_err().to_string(), message);

    // Groups: odd and even ranks.
    let colors: Vec<_> = (0..size).map(|rank| rank % 2).collect();
    let group = comm.split(&colors).unwrap();
    let sum = group.all_reduce(buf(&[rank as f32; 5]), 0..5).wait().unwrap();
    let expected: usize = (0..size).filter(|other| other % 2 == rank % 2).sum();
    assert_eq!(sum.as_slice(), [expected as f32; 5]);

    // Roles: the last rank alone, and the others in a separate world, which is split at other
    // times.
    let alone = |other: usize| usize::from(other + 1 == size && size > 1);
    let role = comm.role(&(0..size).map(alone).collect::<Vec<_>>()).unwrap();
    let mates = (0..size).filter(|other| alone(*other) == alone(rank)).count();
    assert_eq!((role.size(), role.rank()), (mates, if alone(rank) == 1 { 0 } else { rank }));
    every_operation(&role.world()).unwrap();
    if alone(rank) == 0 {
        let all_in_one = role.split(&vec![0; mates]).unwrap();
        let sum = all_in_one.all_reduce(buf(&[1.0]), 0..1).wait().unwrap();
        assert_eq!(sum.as_slice(), [mates as f32]);
        role.clock_offset().unwrap();
    }

    // Every rank sends long messages before any receives: they are sent in the background.
    if size > 1 {
        let next = (rank + 1) % size;
        let previous = (rank + size - 1) % size;
        let sent: Vec<_> =
            (0..3).map(|i| world.send(next, buf(&vec![(rank + i) as f32; 200_000]))).collect();
        for i in 0..3 {
            let received = world.recv(previous, buf(&vec![0.0; 200_000])).wait().unwrap();
            assert!(received.as_slice().iter().all(|&x| x == (previous + i) as f32));
        }
        sent.into_iter().for_each(|sent| assert_eq!(sent.wait().unwrap().len(), 200_000));
        // Every rank posts its receives before any sends, and sums run meanwhile.
        let ready: Vec<_> =
            (0..3).map(|_| world.recv(previous, buf(&vec![0.0; 200_000]))).collect();
        let sum = world.all_reduce(buf(&[1.0; 70_000]), 0..70_000).wait().unwrap();
        assert!(sum.as_slice().iter().all(|&x| x == size as f32));
        let sent: Vec<_> =
            (0..3).map(|i| world.send(next, buf(&vec![(rank + i) as f32; 200_000]))).collect();
        for (i, ready) in ready.into_iter().enumerate() {
            assert!(ready.wait().unwrap().as_slice().iter().all(|&x| x == (previous + i) as f32));
        }
        sent.into_iter().for_each(|sent| drop(sent.wait().unwrap()));
        // Each rank is late once, and the others wait for it.
        for late in 0..size {
            if rank == late {
                std::thread::sleep(Duration::from_millis(30));
            }
            world.barrier().wait().unwrap();
        }
        assert!(comm.stats().sent > 0 && comm.stats().blocked > 0.0, "{:?}", comm.stats());
    }
    world.barrier().wait().unwrap();
    comm.shutdown();
}

macro_rules! operations {
    ($($test:ident: $algorithm:expr, $ranks:expr;)*) => {$(
        #[test]
        fn $test() {
            match is_rank_of(concat!("mpi::", stringify!($test))) {
                true => check_operations($algorithm),
                false => $ranks.into_iter().for_each(|ranks| passes(concat!("mpi::", stringify!($test)), ranks)),
            }
        }
    )*};
}

operations! {
    vendor_matches_threads: Algorithm::Vendor, [1, 2, 3, 4];
    ring_matches_threads: Algorithm::Ring, [1, 2, 3, 4];
    tree_matches_threads: Algorithm::HalvingDoubling, [1, 2, 3, 4];
    hierarchical_matches_threads: Algorithm::Hierarchical, [1, 2, 3, 4, 5];
    reduce_to_one_matches_threads: Algorithm::ReduceToOne, [1, 2, 3, 4];
}

/// Returns the bits of the results of all operations.
fn bits(results: &[Vec<f32>]) -> Vec<u32> {
    results.iter().flatten().map(|x| x.to_bits()).collect()
}

/// A launcher that places ranks round robin: on two nodes, those with even numbers are on the first.
/// They are renumbered, so that `hierarchical` adds in the order of the tree.
#[test]
fn ranks_are_renumbered_by_node() {
    const NAME: &str = "mpi::ranks_are_renumbered_by_node";
    const RANKS: usize = 4;
    if !is_rank_of(NAME) {
        let cyclic = [("HPCTRAIN_RANKS_PER_NODE", "2,cyclic")];
        let (status, printed) = mpirun_with(NAME, RANKS, 2, 60, &cyclic);
        assert!(status.success(), "{printed}");
        return;
    }
    let comm = start_mpi::<Cpu>(Algorithm::Hierarchical).unwrap();
    let rank = comm.rank();
    let launched: usize = std::env::var("OMPI_COMM_WORLD_RANK").unwrap().parse().unwrap();
    assert_eq!((comm.launch_rank(), comm.is_renumbered()), (launched, true));
    assert_eq!(rank, launched % 2 * 2 + launched / 2);
    let world = comm.world();
    assert_eq!((world.nodes(), world.is_first_of_node()), (2, rank.is_multiple_of(2)));
    assert!(world.algorithms(true).contains(&Algorithm::Hierarchical));
    let tree = on_threads(RANKS, rank, Algorithm::HalvingDoubling);
    assert_eq!(bits(&every_operation(&world).unwrap()), bits(&tree));
    // MPI's own collectives use the new numbers, too: each rank receives its part.
    let vendor = world.with_algorithms(AlgorithmTable::uniform(Algorithm::Vendor));
    for (got, wanted) in every_operation(&vendor).unwrap().iter().zip(&tree) {
        assert!(got.iter().zip(wanted).all(|(got, wanted)| (got - wanted).abs() < 1e-3));
    }
    // Messages have the new numbers: the launcher's rank 2 is rank 1.
    let lone = if launched == 2 { Err(Error::input("bad")) } else { Ok(()) };
    assert_eq!(world.all_ok(lone).unwrap_err().to_string(), "rank 1: bad");
    let node = comm.split(&[0, 0, 1, 1]).unwrap();
    let sum = node.all_reduce(buf(&[rank as f32]), 0..1).wait().unwrap();
    assert_eq!((node.nodes(), sum.as_slice()), (1, &[[1.0], [5.0]][rank / 2][..]));
    comm.shutdown();
}

/// Without the same number of ranks on each node, ranks are renumbered as well.
#[test]
fn ranks_of_nodes_of_several_sizes_are_renumbered() {
    const NAME: &str = "mpi::ranks_of_nodes_of_several_sizes_are_renumbered";
    if !is_rank_of(NAME) {
        let cyclic = [("HPCTRAIN_RANKS_PER_NODE", "2,cyclic")];
        let (status, printed) = mpirun_with(NAME, 3, 2, 60, &cyclic);
        assert!(status.success(), "{printed}");
        return;
    }
    let comm = start_mpi::<Cpu>(Algorithm::HalvingDoubling).unwrap();
    assert_eq!(comm.rank(), [0, 2, 1][comm.launch_rank()]);
    let tree = on_threads(3, comm.rank(), Algorithm::HalvingDoubling);
    assert_eq!(bits(&every_operation(&comm.world()).unwrap()), bits(&tree));
    comm.shutdown();
}

/// An abort ends all ranks that were renumbered.
#[test]
fn an_abort_ends_renumbered_ranks() {
    const NAME: &str = "mpi::an_abort_ends_renumbered_ranks";
    if is_rank_of(NAME) {
        let comm = start_mpi::<Cpu>(Algorithm::HalvingDoubling).unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(300));
            comm.abort(3);
        }
        let _ = comm.world().all_reduce(buf(&[1.0; 1000]), 0..1000).wait();
        unreachable!("the abort ends this rank");
    }
    let cyclic = [("HPCTRAIN_RANKS_PER_NODE", "2,cyclic")];
    let (status, printed) = mpirun_with(NAME, 4, 2, 10, &cyclic);
    assert_eq!(status.code(), Some(3), "{printed}");
}

/// MPI's counts have 31 bits, so longer buffers need several calls.
#[test]
#[ignore = "needs 6 GiB of memory and some minutes: cargo test --test comm mpi:: -- --ignored"]
fn more_than_two_gibibytes() {
    const NAME: &str = "mpi::more_than_two_gibibytes";
    if !is_rank_of(NAME) {
        let (status, printed) = mpirun(NAME, 2, 2, 300);
        assert!(status.success(), "{printed}");
        let (status, printed) = mpirun(NAME, 2, 1, 300);
        assert!(status.success(), "{printed}");
        return;
    }
    let comm = start_mpi::<Cpu>(Algorithm::HalvingDoubling).unwrap();
    let world = comm.world();
    let rank = comm.rank();
    let len = (1 << 29) + 6;
    let value = |rank: usize, i: usize| ((i % 1009) * (rank + 1)) as f32;
    let mut whole = Cpu::new(1).alloc(MemoryKind::Communication, len).unwrap();
    for algorithm in [Algorithm::HalvingDoubling, Algorithm::Ring, Algorithm::Vendor] {
        let group = world.with_algorithms(AlgorithmTable::uniform(algorithm));
        for operation in Operation::ALL {
            whole.as_mut_slice().iter_mut().enumerate().for_each(|(i, x)| *x = value(rank, i));
            whole = group.run(operation, whole).wait().unwrap();
            let half = len / 2;
            let (range, expected): (_, fn(usize, usize) -> usize) = match operation {
                Operation::AllReduce => (0..len, |_, _| 3),
                Operation::Reduce => (0..if rank == 0 { len } else { 0 }, |_, _| 3),
                Operation::ReduceScatter => (rank * half..(rank + 1) * half, |_, _| 3),
                Operation::AllGather => (0..len, |i, half| 1 + i / half),
                Operation::Broadcast => (0..len, |_, _| 1),
            };
            for i in range {
                let wanted = ((i % 1009) * expected(i, half)) as f32;
                assert_eq!(whole.as_slice()[i], wanted, "{algorithm} {operation}, element {i}");
            }
        }
    }
    comm.shutdown();
}

/// Rank 1 aborts while the others are in an all-reduce that it never joins.
fn aborts(test: &str, algorithm: Algorithm) {
    if is_rank_of(test) {
        let comm = start_mpi::<Cpu>(algorithm).unwrap();
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(300));
            comm.abort(3);
        }
        let _ = comm.world().all_reduce(buf(&[1.0; 1000]), 0..1000).wait();
        unreachable!("the abort ends this rank");
    }
    let (status, printed) = mpirun(test, 3, 3, 10);
    assert_eq!(status.code(), Some(3), "{printed}");
    assert!(!printed.contains("the abort ends this rank"), "{printed}");
}

#[test]
fn an_abort_ends_all_ranks() {
    aborts("mpi::an_abort_ends_all_ranks", Algorithm::HalvingDoubling);
}

#[test]
fn an_abort_ends_a_rank_inside_the_vendors_collective() {
    aborts("mpi::an_abort_ends_a_rank_inside_the_vendors_collective", Algorithm::Vendor);
}

/// Rank 1 aborts while its own thread is stuck in a receive.
#[test]
fn an_abort_reaches_a_busy_thread() {
    const NAME: &str = "mpi::an_abort_reaches_a_busy_thread";
    if is_rank_of(NAME) {
        let comm = start_mpi::<Cpu>(Algorithm::Ring).unwrap();
        let other = 1 - comm.rank();
        let pending = comm.world().recv(other, buf(&[0.0; 10]));
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(300));
            comm.abort(4);
        }
        let _ = pending.wait();
        unreachable!("the abort ends this rank");
    }
    let (status, printed) = mpirun(NAME, 2, 2, 10);
    assert_eq!(status.code(), Some(4), "{printed}");
}

/// With another library's launcher every process is alone in its world, which is an error.
#[test]
fn a_foreign_launcher_is_recognised() {
    const NAME: &str = "mpi::a_foreign_launcher_is_recognised";
    if is_rank_of(NAME) {
        let error = start_mpi::<Cpu>(Algorithm::Ring).err().unwrap().to_string();
        assert!(
            error.contains("2 processes were started by a launcher that speaks PMI")
                && error.contains("hint: "),
            "{error}"
        );
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([NAME, "--exact"]).envs([(ROLE, NAME), ("PMI_SIZE", "2"), ("PMI_RANK", "0")]);
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    launch::start(&mut command).finish(Duration::from_secs(30)).succeeded();
}

/// Two ranks that request different collectives get an error that names both.
#[cfg(debug_assertions)]
#[test]
fn different_requests_are_named() {
    const NAME: &str = "mpi::different_requests_are_named";
    if is_rank_of(NAME) {
        let comm = start_mpi::<Cpu>(Algorithm::HalvingDoubling).unwrap();
        let unit = ["wte", "h.3"][comm.rank()].into();
        let group = comm.world().with_label(&unit);
        let buf = buf(&[0.0; 6]);
        let request =
            if comm.rank() == 0 { group.all_gather(buf) } else { group.reduce_scatter(buf) };
        let error = request.wait().err().unwrap();
        eprintln!("{error}");
        // Lets both print before the job ends.
        std::thread::sleep(Duration::from_millis(300));
        comm.abort(error.exit_code());
    }
    let (status, printed) = mpirun(NAME, 2, 2, 10);
    assert_eq!(status.code(), Some(1), "{printed}");
    for word in [
        "ranks of a group disagree",
        "rank 0 requests collective 1: all_gather of wte, 24 bytes",
        "rank 1 requests collective 1: reduce_scatter of h.3, 24 bytes",
    ] {
        assert!(printed.contains(word), "{word:?} is missing: {printed}");
    }
}
