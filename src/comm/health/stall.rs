//! Builds the stall report: the ranks that block the job, and where.

use std::collections::BTreeMap;

use super::heartbeat::{Heartbeat, LedgerFile, Told};

/// Ranks that are described one by one.
const DESCRIBED: usize = 8;

/// A rank as another one sees it through the file system.
pub struct Sighting {
    pub heartbeat: Option<Heartbeat>,
    /// Whether its heart still beats.
    pub answers: bool,
}

/// One line about all ranks: first those the others wait for. `now` is in seconds since 1970.
pub fn report(ranks: &[Sighting], ledgers: &[LedgerFile], now: f64) -> String {
    let inside = |sighting: &Sighting| {
        let current = sighting.heartbeat.as_ref()?.current.as_ref()?;
        sighting.answers.then_some(current.number)
    };
    // While a rank is missing, all others wait, some of them one collective later. Else they wait for those behind.
    let missing = ranks.iter().any(|rank| inside(rank).is_none());
    let furthest = ranks.iter().filter_map(inside).max();
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
            Some(told) if missing || Some(told.number) == furthest => {
                let (ranks, longest) = waiting.entry(told.to_string()).or_default();
                ranks.push(rank);
                *longest = longest.max(now - told.started);
            }
            Some(told) => causes.push(format!("rank {rank} ({process}) is at {told} since {}", since(told.started))),
            None => {
                let joined = heartbeat.finished.as_ref().map_or(0, |told| told.number);
                let doing = format!("{} since {}", heartbeat.phase, since(heartbeat.phase_since));
                causes.push(format!("rank {rank} ({process}) has not joined #{}: {doing}", joined + 1));
            }
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
    let mut seen: BTreeMap<(&str, usize, usize, u64), (usize, &Told)> = BTreeMap::new();
    let mut differ: Option<(u64, String)> = None;
    for ledger in ledgers {
        for told in &ledger.collectives {
            // Messages between two ranks are seen by one of them.
            if told.op == "recv" {
                continue;
            }
            let place = (told.group.as_str(), told.first, told.ranks, told.in_group);
            let &mut (rank, other) = seen.entry(place).or_insert((ledger.rank, told));
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
            ranks: 3,
            first: 0,
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
