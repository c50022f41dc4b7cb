//! Tests every algorithm and operation between threads against references.

use std::ops::Range;
use std::sync::mpsc::channel;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use super::health::flight_recorder::Size;
use super::pending::{Pending, reply};
use super::transport::GroupRanks;
use super::worker::CommRequest;
use super::{
    Aborted, Algorithm, Comm, Group, Operation, TcpRendezvous, TermOrder, UnequalCollective, clock,
    single, start_tcp, start_threads_on_nodes, write_secret,
};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::spans;
use hpctrain_cpu::{Cpu, CpuBuf};
use hpctrain_device::{Backend, MemoryKind};

const LONGEST: usize = 300_000;
const LENGTHS: [usize; 8] = [0, 1, 2, 3, 7, 64, 1000, LONGEST];

/// Runs `rank` on a thread for each rank; `nodes` has their nodes. Returns their results, or panics
/// after a timeout.
fn run<T: Send + 'static>(
    nodes: &[usize],
    algorithm: Algorithm,
    rank: impl Fn(Comm<Cpu>) -> T + Clone + Send + 'static,
) -> Vec<std::thread::Result<T>> {
    let comms = start_threads_on_nodes::<Cpu>(nodes, algorithm).unwrap().into_iter();
    run_each(comms.map(|comm| move || comm).collect(), rank)
}

/// Runs `rank` like [`run`], over TCP.
fn run_over_tcp<T: Send + 'static>(
    ranks: usize,
    algorithm: Algorithm,
    rank: impl Fn(Comm<Cpu>) -> T + Clone + Send + 'static,
) -> Vec<std::thread::Result<T>> {
    let folder = tempfile::tempdir().unwrap();
    write_secret(folder.path()).unwrap();
    let starts = (0..ranks).map(|rank| {
        let meeting = TcpRendezvous::on_this_host(folder.path().into(), rank, ranks);
        move || start_tcp(&meeting, algorithm).unwrap()
    });
    run_each(starts.collect(), rank)
}

/// Runs `rank` on a thread for each of `starts`, which creates its communicator there.
fn run_each<T: Send + 'static>(
    starts: Vec<impl FnOnce() -> Comm<Cpu> + Send + 'static>,
    rank: impl Fn(Comm<Cpu>) -> T + Clone + Send + 'static,
) -> Vec<std::thread::Result<T>> {
    let (ranks, (done, results)) = (starts.len(), channel());
    for start in starts {
        let rank = rank.clone();
        let done = done.clone();
        std::thread::spawn(move || {
            let comm = start();
            let index = comm.rank();
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rank(comm)));
            done.send((index, result)).unwrap();
        });
    }
    let limit = Duration::from_secs(60);
    let mut all: Vec<_> =
        (0..ranks).map(|_| results.recv_timeout(limit).expect("a rank hangs")).collect();
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

fn buf(values: &[f32]) -> CpuBuf {
    Cpu::new(1).upload(MemoryKind::Gradients, values).unwrap()
}

/// Returns values whose sum depends on the order of additions, for more ranks than any test has.
fn values(rank: usize, len: usize) -> &'static [f32] {
    static VALUES: LazyLock<Vec<Vec<f32>>> = LazyLock::new(|| (0..20).map(random_values).collect());
    &VALUES[rank][..len]
}

/// Returns random values of several magnitudes, seeded by the rank.
fn random_values(rank: u64) -> Vec<f32> {
    let mut state = rank * 7919 + 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32
    };
    (0..LONGEST + 20).map(|_| (next() - 0.5) * 10f32.powi((next() * 6.0) as i32 - 3)).collect()
}

/// Computes the sum of one element by the documented tree.
fn tree_sum(partial: &mut [f32]) -> f32 {
    let mut stride = 1;
    while stride < partial.len() {
        for i in (0..partial.len()).step_by(2 * stride) {
            if i + stride < partial.len() {
                partial[i] += partial[i + stride];
            }
        }
        stride *= 2;
    }
    partial[0]
}

/// Checks that `got` is the sum of `values` over `ranks` ranks, for the elements in `range`.
fn check_sum(exact: bool, ranks: usize, got: &[f32], len: usize, range: Range<usize>) {
    let inputs: Vec<_> = (0..ranks).map(|rank| values(rank, len)).collect();
    let mut terms = vec![0.0; ranks];
    for i in range {
        (0..ranks).for_each(|rank| terms[rank] = inputs[rank][i]);
        if exact {
            assert_eq!(
                got[i].to_bits(),
                tree_sum(&mut terms).to_bits(),
                "element {i} of {len} on {ranks} ranks"
            );
        } else {
            let exact: f64 = terms.iter().map(|&x| f64::from(x)).sum();
            let scale: f64 = terms.iter().map(|&x| f64::from(x).abs()).sum();
            let error = (f64::from(got[i]) - exact).abs();
            assert!(
                error <= scale * ranks as f64 * f64::from(f32::EPSILON),
                "element {i} of {len}, {ranks} ranks"
            );
        }
    }
}

fn every_operation(group: &Group<Cpu>, algorithm: Algorithm) -> Result<()> {
    every_operation_of(&LENGTHS, group, algorithm)
}

fn every_operation_of(lengths: &[usize], group: &Group<Cpu>, algorithm: Algorithm) -> Result<()> {
    let rank = group.rank();
    let size = group.size();
    let exact = group.algorithms(true).contains(&algorithm);
    for &len in lengths {
        let sum = group.all_reduce(buf(values(rank, len)), 0..len).wait()?;
        check_sum(exact, size, sum.as_slice(), len, 0..len);

        let start = len / 5;
        let end = len - len / 7;
        let sum = group.all_reduce(buf(values(rank, len)), start..end).wait()?;
        check_sum(exact, size, sum.as_slice(), len, start..end);
        let mine = values(rank, len);
        assert_eq!(sum.as_slice()[..start], mine[..start]);
        assert_eq!(sum.as_slice()[end..], mine[end..]);

        let sum = group.reduce(buf(values(rank, len))).wait()?;
        if rank == 0 {
            check_sum(exact, size, sum.as_slice(), len, 0..len);
        }
        let sum = group.reduce_after(Pending::ready(buf(values(rank, len))), start..end).wait()?;
        if rank == 0 {
            check_sum(exact, size, sum.as_slice(), len, start..end);
            assert_eq!(
                (&sum.as_slice()[..start], &sum.as_slice()[end..]),
                (&mine[..start], &mine[end..])
            );
        }

        let padded = len.next_multiple_of(size);
        let part = rank * padded / size..(rank + 1) * padded / size;
        let sum = group.reduce_scatter(buf(values(rank, padded))).wait()?;
        check_sum(exact, size, sum.as_slice(), padded, part.clone());

        let whole = values(19, padded);
        let mut mine = vec![f32::NAN; padded];
        mine[part.clone()].copy_from_slice(&whole[part]);
        assert_eq!(group.all_gather(buf(&mine)).wait()?.as_slice(), whole);

        for root in [0, size - 1, size / 2] {
            let mine = if rank == root { values(root, len).to_vec() } else { vec![f32::NAN; len] };
            assert_eq!(group.broadcast(buf(&mine), root).wait()?.as_slice(), values(root, len));
        }
    }
    Ok(())
}

#[test]
fn every_operation_on_any_number_of_ranks() {
    let own = Algorithm::ALL.into_iter().filter(|&algorithm| algorithm != Algorithm::Vendor);
    for algorithm in own {
        for ranks in (1..=8).chain([12, 13, 15, 19]) {
            for result in run(&vec![0; ranks], algorithm, move |comm| {
                every_operation(&comm.world(), algorithm)
            }) {
                assert!(matches!(result, Ok(Ok(()))), "{algorithm} on {ranks}: {result:?}");
            }
        }
    }
}

/// Measures on `ranks` ranks the rounds of each collective of 4,096 elements per rank, and the
/// bytes that rank 0 sends.
fn rounds(ranks: usize, algorithm: Algorithm) -> Vec<(&'static str, u64, u64)> {
    let results =
        run(&vec![0; ranks], algorithm, move |comm| -> Result<Vec<(&'static str, u64, u64)>> {
            let world = comm.world();
            let rank = comm.rank();
            let len = 4096 * comm.size();
            let mine: Vec<f32> = (0..len).map(|i| (rank * 31 + i % 97) as f32 * 0.1).collect();
            let mut counts = vec![
                count(&world, "agree", || world.all_ok(Ok(())))?,
                count(&world, "gather_bytes", || {
                    world.gather_bytes(vec![0; 100]).wait().map(drop)
                })?,
                count(&world, "gather_bytes_to_root", || {
                    world.gather_bytes_to_root(vec![0; 100]).wait().map(drop)
                })?,
                count(&world, "broadcast_bytes", || {
                    world.broadcast_bytes(vec![0; 100]).wait().map(drop)
                })?,
            ];
            let of_each = if rank == 0 { vec![vec![0; 100]; comm.size()] } else { vec![] };
            counts.push(count(&world, "scatter_bytes", || {
                world.scatter_bytes(of_each).wait().map(drop)
            })?);
            for operation in [
                Operation::ReduceScatter,
                Operation::AllGather,
                Operation::AllReduce,
                Operation::Reduce,
            ] {
                counts.push(count(&world, operation.name(), || {
                    world.run(operation, buf(&mine)).wait().map(drop)
                })?);
            }
            Ok(counts)
        });
    let results: Vec<_> = results.into_iter().map(|result| result.unwrap().unwrap()).collect();
    let most = |i: usize| results.iter().map(|counts| counts[i].1).max().unwrap();
    results[0].iter().enumerate().map(|(i, &(name, _, sent))| (name, most(i), sent)).collect()
}

/// Returns the name of a collective, its rounds, and the bytes that this rank sends in it.
fn count(
    world: &Group<Cpu>,
    name: &'static str,
    collective: impl FnOnce() -> Result<()>,
) -> Result<(&'static str, u64, u64)> {
    // All ranks begin in the same round.
    world.barrier().wait()?;
    let before = world.stats();
    collective()?;
    let after = world.stats();
    Ok((name, after.rounds - before.rounds, after.sent - before.sent))
}

/// Collectives take at most 2⌈log₂ n⌉ + 2 rounds; all_reduce and reduce take ⌈log₂ n⌉ more.
#[test]
fn rounds_grow_with_the_logarithm_of_the_ranks() {
    for ranks in (2..=40usize).chain([64, 96, 129, 256]) {
        let log = ranks.next_power_of_two().ilog2() as u64;
        for algorithm in [Algorithm::HalvingDoubling, Algorithm::ReduceToOne] {
            for (name, rounds, sent) in rounds(ranks, algorithm) {
                // Debug builds compare each request with a neighbour's first.
                let compared = u64::from(cfg!(debug_assertions));
                let most = match name {
                    "agree"
                    | "gather_bytes"
                    | "gather_bytes_to_root"
                    | "broadcast_bytes"
                    | "scatter_bytes" => 2 * log,
                    "all_gather" if algorithm == Algorithm::HalvingDoubling => log,
                    "all_reduce" | "reduce" => 3 * log + 2,
                    _ => 2 * log + 2,
                };
                assert!(
                    rounds <= most + compared,
                    "{name} by {algorithm} on {ranks}: {rounds} rounds of {most}"
                );
                if [64, 96, 256].contains(&ranks) && algorithm == Algorithm::HalvingDoubling {
                    println!("| {ranks} | {name} | {} | {sent} |", rounds - compared);
                }
            }
        }
    }
}

/// Distributes ranks over nodes evenly, unevenly, interleaved, and one per node.
#[test]
fn hierarchies_of_any_shape() {
    let algorithm = Algorithm::Hierarchical;
    let shapes: [(&[usize], bool); 8] = [
        (&[0, 0, 1, 1], true),
        (&[0, 0, 0, 0, 1, 1, 1, 1], true),
        (&[0, 0, 1, 1, 2, 2], true),
        (&[0, 1, 2], true),
        (&[0, 0, 0, 1, 1, 1], false),
        (&[0, 1, 0, 1], false),
        (&[0, 0, 0, 0, 0, 1, 1], false),
        (&[3, 1, 1, 0, 3, 1, 1], false),
    ];
    for (nodes, exact) in shapes {
        for result in run(nodes, algorithm, move |comm| -> Result<()> {
            assert_eq!(comm.world().algorithms(true).contains(&algorithm), exact);
            every_operation(&comm.world(), algorithm)
        }) {
            assert!(matches!(result, Ok(Ok(()))), "{nodes:?}: {result:?}");
        }
    }
}

/// Returns the leaves of each rank's terms: `leaves` leaves dealt to `ranks` ranks in aligned blocks,
/// the largest first.
fn terms_of_ranks(leaves: usize, ranks: usize) -> Vec<Vec<Range<usize>>> {
    let mut terms = vec![vec![]; ranks];
    let mut first = 0;
    let each = leaves / ranks;
    for size in (0..usize::BITS).rev().map(|bit| 1 << bit).filter(|size| each & size > 0) {
        for of_rank in &mut terms {
            of_rank.push(first..first + size);
            first += size;
        }
    }
    terms.iter_mut().take(leaves - first).for_each(|of_rank| {
        of_rank.push(first..first + 1);
        first += 1;
    });
    terms
}

/// Sums unequal terms of leaves, in the layout of `shards` shards of `group.size() / shards`
/// replicas, and compares the result with the sum of the leaves by the tree. Then all-gathers the parts.
fn unequal_sum(group: &Group<Cpu>, leaves: usize, shards: usize, len: usize) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let replicas = ranks / shards;
    let terms = terms_of_ranks(leaves, ranks);
    let mine: Vec<f32> = terms[rank]
        .iter()
        .flat_map(|term| {
            (0..len)
                .map(|i| tree_sum(&mut term.clone().map(|v| values(v, len)[i]).collect::<Vec<_>>()))
        })
        .collect();
    let shard_of = |shard: usize| shard * len / shards..(shard + 1) * len / shards;
    let part = |rank: usize| {
        let shard = shard_of(rank % shards);
        let replica = rank / shards;
        shard.start + replica * shard.len() / replicas
            ..shard.start + (replica + 1) * shard.len() / replicas
    };
    let of_shard = |shard: usize| (shard..ranks).step_by(shards).collect();
    let collective = UnequalCollective {
        len,
        parts: (0..ranks).map(part).collect(),
        terms: Some(Arc::new(TermOrder::new(&terms))),
        all_gathers: (0..shards).map(of_shard).collect(),
    };
    let sum = group.unequal(Pending::ready(buf(&mine)), collective).wait()?;
    for i in shard_of(rank % shards) {
        let mut all: Vec<f32> = (0..leaves).map(|v| values(v, len)[i]).collect();
        assert_eq!(
            sum.as_slice()[i].to_bits(),
            tree_sum(&mut all).to_bits(),
            "element {i} of {len}, {leaves} terms on {shards} × {replicas} ranks"
        );
    }
    let parts: Vec<Range<usize>> =
        (0..ranks).map(|rank| rank * len / ranks..(rank + 1) * len / ranks).collect();
    let whole = values(19, len);
    let mut mine = vec![f32::NAN; len];
    mine[parts[rank].clone()].copy_from_slice(&whole[parts[rank].clone()]);
    let gather =
        UnequalCollective { len, parts, terms: None, all_gathers: vec![(0..ranks).collect()] };
    assert_eq!(group.unequal(Pending::ready(buf(&mine)), gather).wait()?.as_slice(), whole);
    Ok(())
}

#[test]
fn unequal_terms_have_the_sum_of_the_tree() {
    for ranks in 2..=7 {
        for result in run(&vec![0; ranks], Algorithm::HalvingDoubling, move |comm| -> Result<()> {
            let shards = (1..=ranks).filter(|shards| ranks.is_multiple_of(*shards));
            for (shards, leaves) in shards.flat_map(|s| (ranks..=19).map(move |v| (s, v))) {
                for len in [0, 1, 7, 1000] {
                    unequal_sum(&comm.world(), leaves, shards, len)?;
                }
            }
            unequal_sum(&comm.world(), ranks + 1, 1, 40_000)
        }) {
            assert!(matches!(result, Ok(Ok(()))), "{ranks} ranks: {result:?}");
        }
    }
}

/// Ranks without device memory exchange the chunks of ranks with it.
#[test]
fn host_memory_goes_in_chunks_beside_device_memory() {
    for algorithm in [Algorithm::HalvingDoubling, Algorithm::Ring, Algorithm::ReduceToOne] {
        for result in run(&[0, 0, 1, 1], algorithm, move |comm| -> Result<()> {
            let short = &LENGTHS[..LENGTHS.len() - 1];
            for (words, lengths) in [(7, short), (64, short), (50_000, &LENGTHS[..])] {
                let mixed = comm.with_mixed_devices().with_staging_chunk(words);
                every_operation_of(lengths, &mixed.world(), algorithm)?;
                unequal_sum(&mixed.world(), 9, 2, 300)?;
            }
            let mixed = comm.with_mixed_devices().with_staging_chunk(7);
            let long = mixed.world().send(mixed.rank() ^ 1, buf(&[0.0; 8])).wait().map(drop);
            assert!(long.unwrap_err().to_string().contains("a message of 8 words"));
            Ok(())
        }) {
            assert!(matches!(result, Ok(Ok(()))), "{algorithm}: {result:?}");
        }
    }
}

#[test]
fn a_single_rank_is_the_identity() {
    let comm = single::<Cpu>();
    every_operation(&comm.world(), Algorithm::HalvingDoubling).unwrap();
    every_operation(&comm.split(&[5]).unwrap(), Algorithm::HalvingDoubling).unwrap();
    assert_eq!(comm.world().gather_bytes(vec![1]).wait().unwrap(), [[1]]);
    assert_eq!(comm.stats().sent, 0);
    assert!(comm.world().send(0, buf(&[1.0])).wait().is_err());
}

#[test]
fn groups_work_by_themselves() {
    // Rows and columns of a 2×3 mesh.
    let results = run(&[0; 6], Algorithm::HalvingDoubling, |comm| -> Result<()> {
        let rank = comm.rank();
        let row = comm.split(&[0, 0, 0, 1, 1, 1])?;
        let column = comm.split(&[7, 8, 9, 7, 8, 9])?;
        assert_eq!(
            (row.rank(), row.size(), column.rank(), column.size()),
            (rank % 3, 3, rank / 3, 2)
        );
        let sum = |group: &Group<Cpu>| group.all_reduce(buf(&[rank as f32]), 0..1);
        let in_row = sum(&row);
        let in_column = sum(&column);
        assert_eq!(in_row.wait()?.as_slice(), [if rank < 3 { 3.0 } else { 12.0 }]);
        assert_eq!(in_column.wait()?.as_slice(), [(2 * (rank % 3) + 3) as f32]);
        every_operation(&row, Algorithm::HalvingDoubling)?;
        let alone = comm.split(&[0, 1, 2, 3, 4, 5])?;
        assert_eq!(alone.size(), 1);
        assert!(comm.split(&[0]).is_err());
        Ok(())
    });
    assert!(results.iter().all(|result| matches!(result, Ok(Ok(())))), "{results:?}");
}

#[test]
fn a_role_is_a_world() {
    // Ranks 0, 2 and 4, and ranks 1 and 3, which communicate at other times.
    let results = run(&[0; 5], Algorithm::HalvingDoubling, |comm| -> Result<()> {
        let role = comm.role(&[0, 1, 0, 1, 0])?;
        assert_eq!(
            (role.rank(), role.size()),
            (comm.rank() / 2, if comm.rank() % 2 == 0 { 3 } else { 2 })
        );
        assert_eq!(comm.size(), 5);
        every_operation(&role.world(), Algorithm::HalvingDoubling)?;
        if comm.rank() % 2 == 0 {
            let pair = role.split(&[0, 0, 1])?;
            let last = role.rank() == 2;
            assert_eq!(pair.size(), if last { 1 } else { 2 });
            every_operation(&pair, Algorithm::Ring)?;
            assert!(role.split(&[0; 5]).is_err());
        }
        let ranks = comm.world().gather_bytes(vec![role.rank() as u8]).wait()?;
        assert_eq!(ranks, [[0], [0], [1], [1], [2]]);
        Ok(())
    });
    assert!(results.iter().all(|result| matches!(result, Ok(Ok(())))), "{results:?}");
}

#[test]
fn bytes_of_any_number_of_ranks_meet_on_rank_0() {
    for ranks in 2..=9 {
        let results = run(&vec![0; ranks], Algorithm::HalvingDoubling, |comm| {
            let mine = vec![comm.rank() as u8; comm.rank()];
            comm.world().gather_bytes_to_root(mine).wait()
        });
        for (rank, result) in results.into_iter().enumerate() {
            let expected: Vec<Vec<u8>> = (0..ranks).map(|rank| vec![rank as u8; rank]).collect();
            assert_eq!(
                result.unwrap().unwrap(),
                if rank == 0 { expected } else { vec![] },
                "rank {rank} of {ranks}"
            );
        }
    }
}

#[test]
fn bytes_of_rank_0_reach_any_number_of_ranks() {
    for ranks in 1..=9 {
        let results = run(&vec![0; ranks], Algorithm::HalvingDoubling, move |comm| {
            let world = comm.world();
            let of_each: Vec<Vec<u8>> = (0..ranks).map(|rank| vec![rank as u8; rank]).collect();
            let scattered =
                world.scatter_bytes(if comm.rank() == 0 { of_each } else { vec![] }).wait()?;
            Ok::<_, Error>((
                scattered,
                world.broadcast_bytes(vec![comm.rank() as u8 + 7; 3]).wait()?,
            ))
        });
        for (rank, result) in results.into_iter().enumerate() {
            assert_eq!(
                result.unwrap().unwrap(),
                (vec![rank as u8; rank], vec![7; 3]),
                "rank {rank} of {ranks}"
            );
        }
    }
}

#[test]
fn each_rank_has_bytes_for_each_rank() {
    for ranks in 1..=9 {
        let results = run(&vec![0; ranks], Algorithm::HalvingDoubling, move |comm| {
            // Of different lengths, some empty.
            let bytes = |from: usize, to: usize| vec![(16 * from + to) as u8; from * to % 5];
            let mine = (0..ranks).map(|to| bytes(comm.rank(), to)).collect();
            let received = comm.world().all_to_all_bytes(mine).wait()?;
            let expected: Vec<_> = (0..ranks).map(|from| bytes(from, comm.rank())).collect();
            assert_eq!(received, expected);
            Ok::<_, Error>(())
        });
        results.into_iter().for_each(|result| result.unwrap().unwrap());
    }
}

#[test]
fn messages_bytes_and_barriers() {
    for (transport, results) in [
        ("threads", run(&[0; 3], Algorithm::Ring, messages)),
        ("TCP", run_over_tcp(3, Algorithm::Ring, messages)),
    ] {
        assert!(
            results.iter().all(|result| matches!(result, Ok(Ok(())))),
            "{transport}: {results:?}"
        );
    }
}

/// Runs point-to-point messages between three ranks.
fn messages(comm: Comm<Cpu>) -> Result<()> {
    let world = comm.world();
    let rank = comm.rank();
    let next = (rank + 1) % 3;
    let previous = (rank + 2) % 3;
    // Every rank sends before any receives.
    let sent: Vec<_> =
        (0..4).map(|i| world.send(next, buf(&vec![(rank * 10 + i) as f32; 100]))).collect();
    for i in 0..4 {
        let received = world.recv(previous, buf(&[0.0; 100])).wait()?;
        assert_eq!(received.as_slice(), [(previous * 10 + i) as f32; 100]);
    }
    for sent in sent {
        assert_eq!(sent.wait()?.len(), 100);
    }
    // Every rank posts its receive before any sends, and neither blocks a collective.
    let ready: Vec<_> = (0..4).map(|_| world.recv(previous, buf(&[0.0; 100]))).collect();
    let all = world.gather_bytes(vec![rank as u8; rank * 2]).wait()?;
    assert_eq!(all, [vec![], vec![1; 2], vec![2; 4]]);
    let at_root = world.gather_bytes_to_root(vec![rank as u8; rank * 2]).wait()?;
    assert_eq!(at_root, if rank == 0 { all } else { vec![] });
    let sent: Vec<_> =
        (0..4).map(|i| world.send(next, buf(&vec![(rank * 10 + i) as f32; 100]))).collect();
    for (i, ready) in ready.into_iter().enumerate() {
        assert_eq!(ready.wait()?.as_slice(), [(previous * 10 + i) as f32; 100]);
    }
    sent.into_iter().try_for_each(|sent| sent.wait().map(drop))?;
    world.barrier().wait()?;
    let stats = comm.stats();
    assert!(stats.busy > 0.0 && stats.sent >= 3200, "{stats:?}");
    comm.shutdown();
    assert!(world.barrier().wait().unwrap_err().to_string().contains("has ended"));
    Ok(())
}

/// Runs every operation over TCP: in the world, a part of it, and a group of all ranks.
fn every_operation_in_groups(comm: &Comm<Cpu>, algorithm: Algorithm, ranks: usize) -> Result<()> {
    assert_eq!((comm.library(), comm.size()), ("TCP", ranks));
    every_operation(&comm.world(), algorithm)?;
    // Two groups of ranks, which are split at other times.
    let colors: Vec<usize> = (0..ranks).map(|rank| rank % 2).collect();
    let role = comm.role(&colors)?;
    if comm.rank().is_multiple_of(2) {
        every_operation(&role.split(&vec![0; role.size()])?, algorithm)?;
    }
    every_operation(&comm.split(&vec![7; ranks])?, algorithm)
}

#[test]
fn every_operation_over_tcp() {
    let own = Algorithm::ALL.into_iter().filter(|&algorithm| algorithm != Algorithm::Vendor);
    for algorithm in own {
        for ranks in 1..=4 {
            let results = run_over_tcp(ranks, algorithm, move |comm| {
                every_operation_in_groups(&comm, algorithm, ranks)
            });
            for result in results {
                assert!(matches!(result, Ok(Ok(()))), "{algorithm} on {ranks}: {result:?}");
            }
        }
    }
}

/// Posted messages of many megabytes pass each other, before and after their receives are posted,
/// and with exchanges between them.
#[test]
fn long_messages_pass_each_other_over_tcp() {
    const LEN: usize = 3 << 20;
    let results = run_over_tcp(2, Algorithm::HalvingDoubling, |comm| -> Result<()> {
        let world = comm.world();
        let rank = comm.rank();
        let other = 1 - rank;
        let number = |rank: usize, i: usize| (10 * rank + i) as f32;
        let early = world.recv(other, buf(&vec![0.0; LEN]));
        let sent: Vec<_> =
            (0..3).map(|i| world.send(other, buf(&vec![number(rank, i); LEN]))).collect();
        let sum = world.all_reduce(buf(&vec![1.0; LEN]), 0..LEN).wait()?;
        assert!(sum.as_slice().iter().all(|&x| x == 2.0));
        assert!(early.wait()?.as_slice().iter().all(|&x| x == number(other, 0)));
        for i in 1..3 {
            let received = world.recv(other, buf(&vec![0.0; LEN])).wait()?;
            assert!(received.as_slice().iter().all(|&x| x == number(other, i)));
        }
        sent.into_iter().try_for_each(|sent| sent.wait().map(drop))
    });
    assert!(results.iter().all(|result| matches!(result, Ok(Ok(())))), "{results:?}");
}

#[test]
fn a_rank_that_left_is_missed_over_tcp() {
    let results = run_over_tcp(3, Algorithm::Ring, |comm| {
        if comm.rank() == 2 {
            return Ok(());
        }
        comm.world().all_reduce(buf(&[1.0; 10]), 0..10).wait().map(drop)
    });
    let missing: Vec<_> = results.into_iter().filter_map(|result| result.unwrap().err()).collect();
    assert_eq!(missing.len(), 2);
    assert!(
        missing.iter().any(|error| error.to_string().starts_with("rank 2 is gone")),
        "{missing:?}"
    );
}

#[test]
fn ranks_agree_on_errors() {
    let results = run(&[0; 4], Algorithm::HalvingDoubling, |comm| {
        let world = comm.world();
        assert_eq!(world.all_ok(Ok(comm.rank())), Ok(comm.rank()));
        let alike = world.all_ok::<()>(Err(Error::input("no such file").hint("look"))).unwrap_err();
        let lone = match comm.rank() {
            rank @ (1 | 2) => Err(Error::io("read", "x.h5".as_ref(), format!("broken for {rank}"))),
            _ => Ok(()),
        };
        (alike, world.all_ok(lone).unwrap_err())
    });
    for result in results {
        let (alike, lone) = result.unwrap();
        assert_eq!(alike.to_string(), "no such file\nhint: look");
        assert_eq!(lone.to_string(), "rank 1: cannot read x.h5: broken for 1");
        assert_eq!(lone.kind(), Kind::Io);
    }
}

#[test]
fn a_rank_that_left_is_missed() {
    let results = run(&[0; 4], Algorithm::Ring, |comm| {
        if comm.rank() == 2 {
            return Ok(());
        }
        comm.world().all_reduce(buf(&[1.0; 10]), 0..10).wait().map(drop)
    });
    let missing: Vec<_> = results.into_iter().filter_map(|result| result.unwrap().err()).collect();
    assert_eq!(missing.len(), 3);
    assert!(missing.iter().any(|error| error.to_string() == "rank 2 is gone"), "{missing:?}");
}

#[test]
fn an_abort_ends_the_waits_of_all() {
    let results = run(&[0; 3], Algorithm::HalvingDoubling, |comm| {
        // A separate group, on which no rank sends.
        let quiet = comm.split(&[0; 3])?;
        if comm.rank() == 1 {
            // This rank's communication thread waits, too.
            let _stuck = quiet.recv(0, buf(&[0.0]));
            comm.abort(3);
        }
        comm.world().barrier().wait()
    });
    let aborted = results[1].as_ref().unwrap_err();
    assert_eq!(aborted.downcast_ref::<Aborted>().unwrap().code, 3);
    for rank in [0, 2] {
        let error = results[rank].as_ref().unwrap().as_ref().unwrap_err();
        assert_eq!(error.to_string(), "rank 1 aborted with code 3");
    }
}

#[test]
fn a_rank_that_panics_is_missed() {
    let results = run(&[0; 2], Algorithm::HalvingDoubling, |comm| {
        if comm.rank() == 0 {
            std::panic::resume_unwind(Box::new("bug"));
        }
        comm.world().recv(0, buf(&[0.0])).wait().map(drop)
    });
    assert!(results[0].is_err());
    assert!(results[1].as_ref().unwrap().is_err());
}

#[cfg(debug_assertions)]
#[test]
fn different_requests_are_named() {
    let results = run(&[0; 2], Algorithm::Ring, |comm| {
        let world = comm.world();
        let buf = buf(&[0.0; 6]);
        let request =
            if comm.rank() == 0 { world.all_gather(buf) } else { world.all_reduce(buf, 0..4) };
        request.wait().err().map(|error| error.to_string())
    });
    let wanted = "rank 1 requests collective 1: all_reduce, 16 bytes";
    let mut errors = results.into_iter().filter_map(|result| result.unwrap());
    assert!(errors.any(|error| error.contains(wanted) && error.contains("all_gather, 24 bytes")));
}

/// Requests of equal operation and size are compared by unit and root, too.
#[cfg(debug_assertions)]
#[test]
fn units_and_roots_are_compared() {
    let results = run(&[0, 0], Algorithm::HalvingDoubling, |comm| {
        let unit: Arc<str> = format!("{}{}", "long".repeat(50), comm.rank()).into();
        let world = comm.world();
        let same = world.with_label(&"block0".into()).all_gather(buf(&[0.0; 2])).wait();
        (same.map(drop), world.with_label(&unit).all_gather(buf(&[0.0; 2])).wait().map(drop))
    });
    assert!(results.iter().all(|result| result.as_ref().unwrap().0.is_ok()), "{results:?}");
    assert!(results.iter().any(|result| result.as_ref().unwrap().1.is_err()), "{results:?}");

    let results = run(&[0, 0], Algorithm::HalvingDoubling, |comm| {
        let request =
            comm.world().with_label(&"block1".into()).broadcast(buf(&[0.0; 2]), comm.rank());
        request.wait().err().map(|error| error.to_string())
    });
    let wanted =
        "rank 1 requests collective 1: broadcast of block1, 8 bytes from 1 by halving-doubling";
    let mut errors = results.into_iter().filter_map(|result| result.unwrap());
    assert!(errors.any(|error| error.contains(wanted) && error.contains("8 bytes from 0")));
}

#[test]
fn clocks_are_compared() {
    const HOUR: u64 = 3_600_000_000_000;
    let results = run(&[0, 0, 1], Algorithm::HalvingDoubling, |comm| {
        assert!(comm.clock_offset().unwrap().unsigned_abs() < 1_000_000_000);
        let members = GroupRanks::world(comm.rank(), [0, 0, 1].into());
        let label = comm.label("clock", Size::Same(0));
        // Every rank's clock is an hour ahead of the one before.
        let ahead = comm.rank() as u64 * HOUR;
        let (reply, pending) = reply(&comm.inner.shared);
        comm.inner.submit(CommRequest::run(move |state| {
            let now = || spans::now() + ahead;
            reply.send(state.collective(&members, &label, |state| {
                clock::offset(&mut *state.transport, &members, now)
            }));
        }));
        pending.wait().unwrap()
    });
    for (rank, result) in results.into_iter().enumerate() {
        let error = result.unwrap() + rank as i64 * HOUR as i64;
        assert!(error.unsigned_abs() < 100_000_000, "rank {rank}: {error} ns");
    }
}

#[test]
fn impossible_requests_are_refused() {
    let results = run(&[0; 2], Algorithm::Vendor, |comm| {
        let world = comm.world();
        assert!(world.all_reduce(buf(&[0.0; 4]), 2..5).wait().is_err());
        assert!(world.reduce_scatter(buf(&[0.0; 3])).wait().is_err());
        assert!(world.broadcast(buf(&[0.0; 3]), 2).wait().is_err());
        assert!(world.send(comm.rank(), buf(&[])).wait().is_err());
        // Refused requests do not break the group; the last one is refused by the transport.
        world.barrier().wait().unwrap();
        world.all_reduce(buf(&[0.0; 4]), 0..4).wait().err().unwrap().to_string()
    });
    assert!(results.into_iter().all(|error| error.unwrap().contains("requires MPI")));
}
