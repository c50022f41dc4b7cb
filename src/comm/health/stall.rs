//! Builds the stall report: the ranks that block the job, and where.

use std::collections::{BTreeMap, HashMap};

use super::heartbeat::{Heartbeat, LedgerFile, Told};
use super::ledger::RECV;

/// Ranks that are described one by one.
const DESCRIBED: usize = 8;

/// A rank as another one sees it through the file system.
pub struct Sighting {
    pub heartbeat: Option<Heartbeat>,
    /// Whether its heart still beats.
    pub answers: bool,
}

/// The group of a collective: its name and its ranks.
type Place<'a> = (&'a str, &'a [usize]);

fn place_of(told: &Told) -> Place<'_> {
    (&told.group, &told.members)
}

/// The progress of every rank in its groups, as far as heartbeats and ledgers tell.
struct Progress<'a> {
    ranks: &'a [Sighting],
    /// The last collective that a rank has begun in a group.
    begun: HashMap<(usize, Place<'a>), u64>,
}

impl<'a> Progress<'a> {
    fn new(ranks: &'a [Sighting], ledgers: &'a [LedgerFile]) -> Self {
        let of_ledgers = ledgers.iter().flat_map(|ledger| ledger.collectives.iter().map(|told| (ledger.rank, told)));
        let heartbeats = ranks.iter().filter_map(|sighting| sighting.heartbeat.as_ref());
        let of_heartbeats = heartbeats.flat_map(|heartbeat| {
            heartbeat.finished.iter().chain(&heartbeat.current).map(|told| (heartbeat.rank, told))
        });
        let mut begun = HashMap::new();
        for (rank, told) in of_ledgers.chain(of_heartbeats).filter(|(_, told)| told.op != RECV) {
            let last = begun.entry((rank, place_of(told))).or_default();
            *last = told.in_group.max(*last);
        }
        Self { ranks, begun }
    }

    /// The collective that a rank is in, if it answers.
    fn inside(&self, rank: usize) -> Option<&'a Told> {
        let sighting = self.ranks.get(rank).filter(|sighting| sighting.answers)?;
        sighting.heartbeat.as_ref()?.current.as_ref()
    }

    /// The ranks that one waits for in its collective: those of the group that have not begun it, or the sender of a message.
    fn awaited_by(&self, rank: usize) -> Vec<usize> {
        let Some(told) = self.inside(rank) else { return vec![] };
        if told.op == RECV {
            return told.root.and_then(|root| told.members.get(root)).copied().into_iter().collect();
        }
        let has_begun =
            |other: usize| self.begun.get(&(other, place_of(told))).is_some_and(|begun| *begun >= told.in_group);
        told.members.iter().copied().filter(|&other| other < self.ranks.len() && !has_begun(other)).collect()
    }
}

/// One line about all ranks: first those that hold up others and wait for none themselves. `now` is in seconds since 1970.
pub fn report(ranks: &[Sighting], ledgers: &[LedgerFile], now: f64) -> String {
    let progress = Progress::new(ranks, ledgers);
    let awaited_by: Vec<Vec<usize>> = (0..ranks.len()).map(|rank| progress.awaited_by(rank)).collect();
    // The collective in which each rank is awaited, if it is.
    let mut awaited: Vec<Option<&Told>> = vec![None; ranks.len()];
    for (rank, others) in awaited_by.iter().enumerate() {
        others.iter().for_each(|&other| awaited[other] = awaited[other].or(progress.inside(rank)));
    }
    let nobody_waits = awaited.iter().all(Option::is_none);
    let mut causes = Vec::new();
    let mut waiting: BTreeMap<String, (Vec<usize>, f64)> = BTreeMap::new();
    for (rank, sighting) in ranks.iter().enumerate() {
        let Some(heartbeat) = &sighting.heartbeat else {
            causes.push(format!("rank {rank} has left no sign of life"));
            continue;
        };
        let process = format!("process {} on {}", heartbeat.pid, heartbeat.host);
        let since = |then: f64| span(now - then);
        match &heartbeat.current {
            _ if !sighting.answers => causes.push(format!(
                "rank {rank} ({process}) does not answer: last seen {} ago {}",
                since(heartbeat.time),
                place(heartbeat)
            )),
            Some(told) if awaited[rank].is_some() && awaited_by[rank].is_empty() => {
                causes.push(format!("rank {rank} ({process}) is at {told} since {}", since(told.started)));
            }
            Some(told) => {
                let (ranks, longest) = waiting.entry(told.to_string()).or_default();
                ranks.push(rank);
                *longest = longest.max(now - told.started);
            }
            None if awaited[rank].is_some() || nobody_waits => {
                let joined = heartbeat.finished.as_ref().map_or(0, |told| told.number);
                let doing = format!("{} since {}", heartbeat.phase, since(heartbeat.phase_since));
                causes.push(format!("rank {rank} ({process}) has not joined #{}: {doing}", joined + 1));
            }
            // It computes, and nobody waits for it.
            None => {}
        }
    }
    let others = causes.len().saturating_sub(DESCRIBED);
    causes.truncate(DESCRIBED);
    if others > 0 {
        causes.push(format!("{others} more like these"));
    }
    if causes.is_empty() {
        causes.push("no rank is missing".into());
    }
    causes.extend(disagreement(ledgers));
    causes.extend(waiting.into_iter().map(|(told, (ranks, longest))| match ranks.as_slice() {
        [rank] => format!("rank {rank} waits in {told} since {}", span(longest)),
        _ => format!("ranks {} wait in {told} since {}", list(&ranks), span(longest)),
    }));
    format!("the job stands still: {}", causes.join("; "))
}

/// The place at which a rank was last seen.
fn place(heartbeat: &Heartbeat) -> String {
    match (&heartbeat.current, &heartbeat.finished) {
        (Some(told), _) => format!("in {told}"),
        (None, Some(told)) => format!("after {told} ({})", heartbeat.phase),
        (None, None) => format!("in {}", heartbeat.phase),
    }
}

/// The first collective of a group that two of its ranks saw differently.
fn disagreement(ledgers: &[LedgerFile]) -> Option<String> {
    let alike = |a: &Told, b: &Told| (&a.op, &a.unit, a.root) == (&b.op, &b.unit, b.root);
    let mut seen: HashMap<(Place<'_>, u64), (usize, &Told)> = HashMap::new();
    let mut differ: Option<(u64, String)> = None;
    for ledger in ledgers {
        for told in &ledger.collectives {
            // Messages between two ranks are seen by one of them.
            if told.op == RECV {
                continue;
            }
            let &mut (rank, other) = seen.entry((place_of(told), told.in_group)).or_insert((ledger.rank, told));
            if !alike(told, other) && differ.as_ref().is_none_or(|(number, _)| told.number < *number) {
                let text = format!("ranks disagree: rank {rank} made {other}, rank {} {told}", ledger.rank);
                differ = Some((told.number, text));
            }
        }
    }
    differ.map(|(_, text)| text)
}

/// Ascending numbers as `0, 2–7`.
fn list(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let texts = runs.flat_map(|run| match run {
        [first, .., last] if run.len() > 2 => vec![format!("{first}–{last}")],
        short => short.iter().map(usize::to_string).collect(),
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// Seconds, as exactly as it matters.
fn span(seconds: f64) -> String {
    if seconds < 10.0 { format!("{:.1} s", seconds.max(0.0)) } else { format!("{seconds:.0} s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(number: u64, op: &str, unit: Option<&str>, ended: bool) -> Told {
        Told {
            number,
            op: op.into(),
            unit: unit.map(Into::into),
            group: "data".into(),
            members: vec![0, 1, 2],
            in_group: number,
            bytes: 8,
            algorithm: "tree".into(),
            root: None,
            started: 70.0,
            ended: ended.then_some(71.0),
        }
    }

    fn sighting(rank: usize, answers: bool, finished: Option<Told>, current: Option<Told>) -> Sighting {
        let (phase, host) = ("wait for data".into(), "node".into());
        let (pid, beat, waits) = (100 + rank as u32, 5, false);
        let heartbeat =
            Heartbeat { rank, pid, host, beat, time: 88.0, phase, phase_since: 69.0, waits, finished, current };
        Sighting { heartbeat: Some(heartbeat), answers }
    }

    fn waiting(rank: usize) -> Sighting {
        sighting(rank, true, None, Some(told(43, "all_gather", Some("wte"), false)))
    }

    #[test]
    fn the_one_that_others_wait_for_is_named() {
        let done = || Some(told(42, "reduce_scatter", Some("block3"), true));
        let told = report(&[waiting(0), sighting(1, true, done(), None), waiting(2)], &[], 100.0);
        let wanted = "the job stands still: rank 1 (process 101 on node) has not joined #43: wait for data since 31 s; \
                      ranks 0, 2 wait in #43 all_gather of wte since 30 s";
        assert_eq!(told, wanted);

        let told = report(&[waiting(0), sighting(1, false, done(), None), waiting(2)], &[], 100.0);
        let wanted = "rank 1 (process 101 on node) does not answer: last seen 12 s ago after #42 reduce_scatter of \
                      block3 (wait for data); ";
        assert!(told.contains(wanted), "{told}");

        let behind = self::told(42, "reduce_scatter", Some("block3"), false);
        let behind = || sighting(0, true, None, Some(behind.clone()));
        let told = report(&[behind(), waiting(1), waiting(2)], &[], 100.0);
        let wanted =
            "still: rank 0 (process 100 on node) is at #42 reduce_scatter of block3 since 30 s; ranks 1, 2 wait";
        assert!(told.contains(wanted), "{told}");
        let gone = Sighting { heartbeat: None, answers: false };
        let told = report(&[behind(), gone, waiting(2)], &[], 100.0);
        let wanted = "still: rank 1 has left no sign of life; rank 0 waits in #42 reduce_scatter of block3 since 30 s; \
                      rank 2 waits in #43";
        assert!(told.contains(wanted), "{told}");
    }

    /// Running numbers of ranks do not compare where ranks are in different groups.
    #[test]
    fn waits_are_followed_through_groups_and_messages() {
        let of = |group: &str, members: &[usize], number, in_group, op: &str, root| {
            let (group, members) = (group.into(), members.to_vec());
            Some(Told { group, members, in_group, root, ..told(number, op, None, false) })
        };
        // Ranks 0 and 1 are one stage, 2 and 3 the next; 3 computes, 2 waits for it, 0 for a gradient of 2, 1 for 0.
        let ranks = [
            sighting(0, true, None, of("pipeline", &[0, 2], 90, 7, RECV, Some(1))),
            sighting(1, true, None, of("data", &[0, 1], 95, 8, "reduce_scatter", None)),
            sighting(2, true, None, of("data", &[2, 3], 12, 5, "reduce_scatter", None)),
            sighting(3, true, of("data", &[2, 3], 11, 4, "reduce_scatter", None), None),
        ];
        let text = report(&ranks, &[], 100.0);
        let wanted =
            "the job stands still: rank 3 (process 103 on node) has not joined #12: wait for data since 31 s; rank 2";
        assert!(text.starts_with(wanted), "{text}");
        for wanted in ["rank 2 waits in #12 reduce_scatter", "rank 0 waits in #90 recv", "rank 1 waits in #95"] {
            assert!(text.contains(wanted), "{text}");
        }
        // A rank that computes and is not awaited is no cause.
        let text = report(&[sighting(0, true, None, None), waiting(1), sighting(2, false, None, None)], &[], 100.0);
        assert!(text.contains("rank 0 (process 100 on node) has not joined"), "{text}");
        let alone = of("data", &[1, 2], 3, 3, "barrier", None);
        let text = report(
            &[sighting(0, true, None, None), sighting(1, true, None, alone), sighting(2, false, None, None)],
            &[],
            100.0,
        );
        assert!(!text.contains("rank 0"), "{text}");
    }

    #[test]
    fn ranks_that_disagree_are_named() {
        let ledger = |rank, ops: &[&str]| LedgerFile {
            rank,
            pid: 1,
            host: "node".into(),
            time: 0.0,
            collectives: ops.iter().zip(1..).map(|(op, number)| told(number, op, None, false)).collect(),
        };
        let alike = [ledger(0, &["a", "b", "c"]), ledger(1, &["a", "b"])];
        let text = report(&[waiting(0), waiting(1)], &alike, 75.5);
        assert!(text.contains("no rank is missing; ranks 0, 1 wait in #43 all_gather of wte since 5.5 s"), "{text}");
        let differ = [ledger(0, &["a", "b", "c"]), ledger(1, &["a", "x", "y"])];
        let text = report(&[waiting(0), waiting(1)], &differ, 75.5);
        assert!(text.contains("ranks disagree: rank 0 made #2 b, rank 1 #2 x;"), "{text}");
    }

    #[test]
    fn many_ranks_are_told_briefly() {
        assert_eq!(list(&[0, 2, 3, 4, 7, 8, 10]), "0, 2–4, 7, 8, 10");
        let ranks: Vec<_> = (0..50).map(|rank| sighting(rank, false, None, None)).collect();
        let text = report(&ranks, &[], 100.0);
        assert!(text.matches("does not answer").count() == DESCRIBED && text.ends_with("; 42 more like these"));
    }
}
