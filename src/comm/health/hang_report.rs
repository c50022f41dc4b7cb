//! Builds the report of a hang: which ranks block the job, and where.
//!
//! If no rank is missing, messages may be. If two ranks of different hosts are alive and wait for
//! each other in one collective, their hosts cannot reach each other: heartbeats arrive by the file
//! system, but messages do not.

use std::collections::{BTreeMap, HashMap};

use super::flight_recorder::RECV;
use super::heartbeat::{CollectiveState, FlightRecorderFile, Heartbeat};
use crate::algorithms::Algorithm;

/// The most causes that are listed one by one.
const DESCRIBED: usize = 8;

/// The state of a rank, as its heartbeats show it to other ranks.
pub struct RankState {
    pub heartbeat: Option<Heartbeat>,
    /// Whether its heartbeat has changed recently.
    pub answers: bool,
}

/// The group of a collective: its name and its ranks.
type GroupKey<'a> = (&'a str, &'a [usize]);

fn group_key(collective: &CollectiveState) -> GroupKey<'_> {
    (&collective.group, &collective.members)
}

/// The progress of every rank in its groups, from heartbeats and flight recorders.
struct Progress<'a> {
    ranks: &'a [RankState],
    /// The last collective that a rank has begun in a group, by number in the group.
    begun: HashMap<(usize, GroupKey<'a>), u64>,
    /// The last collective that a rank has ended in a group.
    ended: HashMap<(usize, GroupKey<'a>), u64>,
}

impl<'a> Progress<'a> {
    fn new(ranks: &'a [RankState], recorders: &'a [FlightRecorderFile]) -> Self {
        let from_recorders = recorders.iter().flat_map(|recorder| {
            recorder.collectives.iter().map(|collective| (recorder.rank, collective))
        });
        let heartbeats = ranks.iter().filter_map(|state| state.heartbeat.as_ref());
        let from_heartbeats = heartbeats.flat_map(|heartbeat| {
            heartbeat
                .finished
                .iter()
                .chain(&heartbeat.current)
                .map(|collective| (heartbeat.rank, collective))
        });
        let mut begun = HashMap::new();
        let mut ended = HashMap::new();
        let note = |last: &mut HashMap<_, u64>, rank: usize, collective: &'a CollectiveState| {
            let last = last.entry((rank, group_key(collective))).or_default();
            *last = collective.in_group.max(*last);
        };
        for (rank, collective) in
            from_recorders.chain(from_heartbeats).filter(|(_, collective)| collective.op != RECV)
        {
            note(&mut begun, rank, collective);
            if collective.ended.is_some() {
                note(&mut ended, rank, collective);
            }
        }
        Self { ranks, begun, ended }
    }

    /// Returns the collective that a rank is in, if the rank responds.
    fn inside(&self, rank: usize) -> Option<&'a CollectiveState> {
        let state = self.ranks.get(rank).filter(|state| state.answers)?;
        state.heartbeat.as_ref()?.current.as_ref()
    }

    /// Returns the ranks that `rank` waits for in its collective: those of the group that have not
    /// begun it, or the sender of a message.
    fn awaited_by(&self, rank: usize) -> Vec<usize> {
        let Some(collective) = self.inside(rank) else { return vec![] };
        if collective.op == RECV {
            return collective
                .root
                .and_then(|root| collective.members.get(root))
                .copied()
                .into_iter()
                .collect();
        }
        collective
            .members
            .iter()
            .copied()
            .filter(|&other| other < self.ranks.len() && !self.has_begun(other, collective))
            .collect()
    }

    /// Returns true if a rank has begun the collective that another one is in.
    fn has_begun(&self, rank: usize, collective: &CollectiveState) -> bool {
        self.begun
            .get(&(rank, group_key(collective)))
            .is_some_and(|begun| *begun >= collective.in_group)
    }

    fn heartbeat(&self, rank: usize) -> Option<&'a Heartbeat> {
        self.ranks.get(rank)?.heartbeat.as_ref()
    }

    /// Returns the ranks that `rank` exchanges with, and the number of the exchange in its
    /// collective.
    fn exchange(&self, rank: usize) -> (&'a [usize], u64) {
        let collective = self.inside(rank).filter(|collective| collective.op != RECV);
        let exchange = collective.and_then(|_| self.heartbeat(rank)?.exchange.as_ref());
        exchange.map_or((&[], 0), |exchange| (&exchange.with, exchange.number))
    }

    /// Returns true if a rank has ended the collective that another one is in.
    fn is_past(&self, rank: usize, collective: &CollectiveState) -> bool {
        self.ended
            .get(&(rank, group_key(collective)))
            .is_some_and(|ended| *ended >= collective.in_group)
    }

    /// Returns pairs of a rank and one that it waits for although that one has sent its messages,
    /// so they did not arrive. Both ranks respond and are on different hosts.
    fn cut_off(&self, awaited_by: &[Vec<usize>], has_cause: bool) -> Vec<(usize, usize)> {
        let pairs = |of: &dyn Fn(usize) -> Vec<usize>| -> Vec<(usize, usize)> {
            let all = (0..self.ranks.len())
                .flat_map(|rank| of(rank).into_iter().map(move |other| (rank, other)));
            all.filter(|&(rank, other)| self.on_different_hosts(rank, other)).collect()
        };
        let together = |other: usize, collective: &CollectiveState| {
            self.inside(other).is_some_and(|its| {
                (group_key(its), its.in_group) == (group_key(collective), collective.in_group)
            })
        };
        let sure = pairs(&|rank| {
            self.in_exchange(rank, |other, collective| {
                self.is_past(other, collective)
                    || together(other, collective) && self.exchange(other).0.contains(&rank)
            })
        });
        // The following signs count only where nothing else explains the waits.
        if !sure.is_empty() || has_cause {
            return sure;
        }
        // In a ring no rank waits for the one that waits for it. A peer that is at an earlier
        // exchange is itself late.
        let likely = pairs(&|rank| {
            self.in_exchange(rank, |other, collective| {
                together(other, collective) && self.exchange(other).1 >= self.exchange(rank).1
            })
        });
        if !likely.is_empty() {
            return likely;
        }
        let crossed = pairs(&|rank| {
            let others = awaited_by[rank].iter().copied();
            others.filter(|&other| awaited_by[other].contains(&rank)).collect()
        });
        if !crossed.is_empty() {
            return crossed;
        }
        // The exchanges inside vendor collectives are unknown.
        pairs(&|rank| match self
            .inside(rank)
            .filter(|collective| collective.algorithm == Algorithm::Vendor.name())
        {
            Some(collective) => {
                let others = collective.members.iter().copied();
                others
                    .filter(|&other| together(other, collective) || self.is_past(other, collective))
                    .collect()
            }
            None => vec![],
        })
    }

    /// Returns the ranks that `rank` exchanges with in its collective and for which `done` holds.
    fn in_exchange(
        &self,
        rank: usize,
        done: impl Fn(usize, &CollectiveState) -> bool,
    ) -> Vec<usize> {
        let Some(collective) = self.inside(rank) else { return vec![] };
        self.exchange(rank).0.iter().copied().filter(|&other| done(other, collective)).collect()
    }

    /// Returns true if two ranks respond and are on different hosts.
    fn on_different_hosts(&self, rank: usize, other: usize) -> bool {
        let host =
            |rank: usize| Some(&self.heartbeat(rank).filter(|_| self.ranks[rank].answers)?.host);
        matches!((host(rank), host(other)), (Some(one), Some(another)) if one != another)
    }

    /// Returns the ranks of each host that has several ranks, none of which responds. Empty if
    /// there is only one host.
    fn silent_hosts(&self) -> BTreeMap<&'a str, Vec<usize>> {
        let mut hosts: BTreeMap<&str, (bool, Vec<usize>)> = BTreeMap::new();
        for (rank, state) in self.ranks.iter().enumerate() {
            if let Some(heartbeat) = &state.heartbeat {
                let (answers, ranks) = hosts.entry(&heartbeat.host).or_default();
                *answers |= state.answers;
                ranks.push(rank);
            }
        }
        let several = hosts.len() > 1;
        let silent = hosts
            .into_iter()
            .filter(|(_, (answers, ranks))| several && !answers && ranks.len() > 1);
        silent.map(|(host, (_, ranks))| (host, ranks)).collect()
    }
}

/// Describes each pair of hosts that cannot reach each other.
fn describe_unreachable_hosts(progress: &Progress<'_>, pairs: &[(usize, usize)]) -> Vec<String> {
    let mut hosts: BTreeMap<(&str, &str), (usize, usize)> = BTreeMap::new();
    for &(rank, other) in pairs {
        if let (Some(one), Some(another)) = (progress.heartbeat(rank), progress.heartbeat(other)) {
            let one = one.host.as_str();
            let another = another.host.as_str();
            hosts.entry((one.min(another), one.max(another))).or_insert((rank, other));
        }
    }
    let texts = hosts.into_iter().map(|((one, another), (rank, other))| {
        let place =
            progress.inside(rank).map(|collective| format!(" in {collective}")).unwrap_or_default();
        format!(
            "hosts {one} and {another} do not reach each other: rank {rank} waits for rank {other}{place}"
        )
    });
    texts.collect()
}

/// Describes all ranks in one line, first those that block others without waiting themselves. `now`
/// is in seconds since 1970.
pub fn report(ranks: &[RankState], recorders: &[FlightRecorderFile], now: f64) -> String {
    let progress = Progress::new(ranks, recorders);
    let awaited_by: Vec<Vec<usize>> =
        (0..ranks.len()).map(|rank| progress.awaited_by(rank)).collect();
    // The collective in which other ranks wait for each rank.
    let mut awaited: Vec<Option<&CollectiveState>> = vec![None; ranks.len()];
    for (rank, others) in awaited_by.iter().enumerate() {
        others.iter().for_each(|&other| awaited[other] = awaited[other].or(progress.inside(rank)));
    }
    let nobody_waits = awaited.iter().all(Option::is_none);
    let disagreement = disagreement(recorders);
    // A late rank explains the waits of the others.
    let has_cause = ranks.iter().enumerate().any(|(rank, state)| {
        !state.answers || awaited[rank].is_some() && progress.inside(rank).is_none()
    });
    let pairs =
        if disagreement.is_none() { progress.cut_off(&awaited_by, has_cause) } else { vec![] };
    let is_cut_off = |rank: usize| pairs.iter().any(|(waiting, _)| *waiting == rank);
    let silent = progress.silent_hosts();
    let mut causes = describe_unreachable_hosts(&progress, &pairs);
    let mut waiting: BTreeMap<String, (Vec<usize>, f64)> = BTreeMap::new();
    for (rank, state) in ranks.iter().enumerate() {
        let Some(heartbeat) = &state.heartbeat else {
            causes.push(format!("rank {rank} has written no heartbeat"));
            continue;
        };
        let process = format!("process {} on {}", heartbeat.pid, heartbeat.host);
        let since = |then: f64| span(now - then);
        match &heartbeat.current {
            _ if !state.answers && silent.contains_key(heartbeat.host.as_str()) => {
                let ranks = &silent[heartbeat.host.as_str()];
                if ranks.first() == Some(&rank) {
                    let host = &heartbeat.host;
                    let ranks = list(ranks);
                    let seen = since(heartbeat.time);
                    causes.push(format!(
                        "host {host} with ranks {ranks} does not answer: rank {rank} was last seen {seen} ago {}",
                        place(heartbeat)
                    ));
                }
            }
            _ if !state.answers => causes.push(format!(
                "rank {rank} ({process}) does not answer: last seen {} ago {}",
                since(heartbeat.time),
                place(heartbeat)
            )),
            Some(collective)
                if awaited[rank].is_some() && awaited_by[rank].is_empty() && !is_cut_off(rank) =>
            {
                causes.push(format!(
                    "rank {rank} ({process}) is at {collective} since {}",
                    since(collective.started)
                ));
            }
            Some(collective) => {
                let (ranks, longest) = waiting.entry(collective.to_string()).or_default();
                ranks.push(rank);
                *longest = longest.max(now - collective.started);
            }
            None if awaited[rank].is_some() || nobody_waits => {
                let joined = heartbeat.finished.as_ref().map_or(0, |collective| collective.number);
                let doing = format!("{} since {}", heartbeat.phase, since(heartbeat.phase_since));
                causes.push(format!(
                    "rank {rank} ({process}) has not joined #{}: {doing}",
                    joined + 1
                ));
            }
            // It computes, and no rank waits for it.
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
    causes.extend(disagreement);
    causes.extend(waiting.into_iter().map(
        |(collective, (ranks, longest))| match ranks.as_slice() {
            [rank] => format!("rank {rank} waits in {collective} since {}", span(longest)),
            _ => format!("ranks {} wait in {collective} since {}", list(&ranks), span(longest)),
        },
    ));
    format!("the job hangs: {}", causes.join("; "))
}

/// Describes what a rank was last seen doing.
fn place(heartbeat: &Heartbeat) -> String {
    match (&heartbeat.current, &heartbeat.finished) {
        (Some(collective), _) => format!("in {collective}"),
        (None, Some(collective)) => format!("after {collective} ({})", heartbeat.phase),
        (None, None) => format!("in {}", heartbeat.phase),
    }
}

/// Describes the first collective of a group that two of its ranks recorded differently.
fn disagreement(recorders: &[FlightRecorderFile]) -> Option<String> {
    let mut seen: HashMap<(GroupKey<'_>, u64), (usize, &CollectiveState)> = HashMap::new();
    let mut differ: Option<(u64, String)> = None;
    for recorder in recorders {
        for collective in &recorder.collectives {
            // Only the receiver records a point-to-point message.
            if collective.op == RECV {
                continue;
            }
            let &mut (rank, other) = seen
                .entry((group_key(collective), collective.in_group))
                .or_insert((recorder.rank, collective));
            let is_same = (&collective.op, &collective.unit, collective.root)
                == (&other.op, &other.unit, other.root);
            if !is_same && differ.as_ref().is_none_or(|(number, _)| collective.number < *number) {
                let text = format!(
                    "ranks disagree: rank {rank} made {other}, rank {} {collective}",
                    recorder.rank
                );
                differ = Some((collective.number, text));
            }
        }
    }
    differ.map(|(_, text)| text)
}

/// Formats ascending numbers such as `0, 2–7`.
fn list(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b);
    let texts = runs.flat_map(|run| match run {
        [first, .., last] if run.len() > 2 => vec![format!("{first}–{last}")],
        short => short.iter().map(usize::to_string).collect(),
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// Formats a duration in seconds, with a decimal if it is short.
fn span(seconds: f64) -> String {
    if seconds < 10.0 { format!("{:.1} s", seconds.max(0.0)) } else { format!("{seconds:.0} s") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::heartbeat::Exchange;

    fn collective(number: u64, op: &str, unit: Option<&str>, ended: bool) -> CollectiveState {
        CollectiveState {
            number,
            op: op.into(),
            unit: unit.map(Into::into),
            group: "data".into(),
            members: vec![0, 1, 2],
            in_group: number,
            bytes: 8,
            algorithm: "halving-doubling".into(),
            root: None,
            started: 70.0,
            ended: ended.then_some(71.0),
        }
    }

    fn state(
        rank: usize,
        answers: bool,
        finished: Option<CollectiveState>,
        current: Option<CollectiveState>,
    ) -> RankState {
        let phase = "wait for data".into();
        let host = "node".into();
        let pid = 100 + rank as u32;
        let beat = 5;
        let waits = false;
        let time = 88.0;
        let phase_since = 69.0;
        let exchange = None;
        let heartbeat = Heartbeat {
            rank,
            pid,
            host,
            beat,
            time,
            phase,
            phase_since,
            waits,
            finished,
            current,
            exchange,
        };
        RankState { heartbeat: Some(heartbeat), answers }
    }

    /// Returns a rank of a host in collective `number` of all ranks, in exchange `nth` of it with
    /// the ranks `with`.
    fn on(host: &str, rank: usize, number: u64, with: &[usize], nth: u64) -> RankState {
        let collective = CollectiveState {
            members: vec![0, 1, 2, 3],
            ..collective(number, "all_reduce", Some("head"), false)
        };
        let mut state = state(rank, true, None, Some(collective));
        if let Some(heartbeat) = &mut state.heartbeat {
            heartbeat.host = host.into();
            heartbeat.exchange =
                (!with.is_empty()).then(|| Exchange { with: with.to_vec(), number: nth });
        }
        state
    }

    /// Moves a rank on to its next collective: it has finished number 9 of all ranks.
    fn moved_on(mut state: RankState) -> RankState {
        let heartbeat = state.heartbeat.as_mut().unwrap();
        let mut current = heartbeat.current.clone().unwrap();
        heartbeat.finished =
            Some(CollectiveState { ended: Some(71.0), number: 9, in_group: 9, ..current.clone() });
        // It may be of another group.
        current.group = "world".into();
        heartbeat.current = Some(current);
        state
    }

    /// Returns a rank of a host in a vendor collective.
    fn vendor(host: &str, rank: usize) -> RankState {
        let mut state = on(host, rank, 9, &[], 0);
        let collective = state.heartbeat.as_mut().and_then(|heartbeat| heartbeat.current.as_mut());
        collective.unwrap().algorithm = "vendor".into();
        state
    }

    /// Returns a rank of a host that waits for a message from another one.
    fn receives(host: &str, rank: usize, from: usize) -> RankState {
        let mut state = on(host, rank, 9, &[], 0);
        let collective =
            state.heartbeat.as_mut().and_then(|heartbeat| heartbeat.current.as_mut()).unwrap();
        (collective.op, collective.members, collective.root) =
            (RECV.into(), vec![0, 1], Some(from));
        state
    }

    /// Returns a collective of a group, if it is the current or the finished one of a rank.
    fn collective_of(
        group: &str,
        members: &[usize],
        number: u64,
        in_group: u64,
        op: &str,
        root: Option<usize>,
    ) -> Option<CollectiveState> {
        Some(CollectiveState {
            group: group.into(),
            members: members.to_vec(),
            in_group,
            root,
            ..collective(number, op, None, false)
        })
    }

    /// Returns the flight recorder of a rank with collectives that are numbered from `first`.
    fn recorder(rank: usize, first: u64, ops: &[&str]) -> FlightRecorderFile {
        let numbered = ops.iter().zip(first..);
        FlightRecorderFile {
            rank,
            pid: 1,
            host: "node".into(),
            time: 0.0,
            collectives: numbered.map(|(op, number)| collective(number, op, None, false)).collect(),
        }
    }

    fn waiting(rank: usize) -> RankState {
        state(rank, true, None, Some(collective(43, "all_gather", Some("wte"), false)))
    }

    #[test]
    fn the_one_that_others_wait_for_is_named() {
        let done = || Some(collective(42, "reduce_scatter", Some("block3"), true));
        let text = report(&[waiting(0), state(1, true, done(), None), waiting(2)], &[], 100.0);
        let wanted = "the job hangs: rank 1 (process 101 on node) has not joined #43: wait for data since 31 s; \
                      ranks 0, 2 wait in #43 all_gather of wte since 30 s";
        assert_eq!(text, wanted);

        let text = report(&[waiting(0), state(1, false, done(), None), waiting(2)], &[], 100.0);
        let wanted = "rank 1 (process 101 on node) does not answer: last seen 12 s ago after #42 reduce_scatter of \
                      block3 (wait for data); ";
        assert!(text.contains(wanted), "{text}");

        let behind = collective(42, "reduce_scatter", Some("block3"), false);
        let behind = || state(0, true, None, Some(behind.clone()));
        let text = report(&[behind(), waiting(1), waiting(2)], &[], 100.0);
        let wanted = "hangs: rank 0 (process 100 on node) is at #42 reduce_scatter of block3 since 30 s; ranks 1, 2 wait";
        assert!(text.contains(wanted), "{text}");
        let gone = RankState { heartbeat: None, answers: false };
        let text = report(&[behind(), gone, waiting(2)], &[], 100.0);
        let wanted = "hangs: rank 1 has written no heartbeat; rank 0 waits in #42 reduce_scatter of block3 since 30 s; \
                      rank 2 waits in #43";
        assert!(text.contains(wanted), "{text}");
    }

    #[test]
    fn hosts_that_do_not_reach_each_other_are_named() {
        let cut = "the job hangs: hosts h0 and h1 do not reach each other: rank";
        // Halving-doubling: neighbours are done, and pairs across the hosts wait.
        let tree = [
            on("h0", 0, 9, &[2], 2),
            on("h0", 1, 9, &[3], 2),
            on("h1", 2, 9, &[0], 2),
            on("h1", 3, 9, &[1], 2),
        ];
        let text = report(&tree, &[], 100.0);
        let wanted = format!(
            "{cut} 0 waits for rank 2 in #9 all_reduce of head; ranks 0–3 wait in #9 all_reduce of head since 30 s"
        );
        assert_eq!(text, wanted);
        // Ring: rank 1 waits for rank 0, which is behind because nothing arrives from rank 3.
        let ring = [
            on("h0", 0, 9, &[3, 1], 4),
            on("h0", 1, 9, &[0, 2], 5),
            on("h1", 2, 9, &[1, 3], 4),
            on("h1", 3, 9, &[2, 0], 4),
        ];
        let text = report(&ring, &[], 100.0);
        assert!(text.starts_with(&format!("{cut} 0 waits for rank 3 in #9")), "{text}");
        // Rank 0 has sent everything, as far as it knows, and waits in the next collective for
        // ranks that have not begun it.
        let mut past = tree;
        past[0] = moved_on(on("h0", 0, 10, &[1], 1));
        past[1] = moved_on(on("h0", 1, 10, &[0], 1));
        let text = report(&past, &[], 100.0);
        assert!(text.starts_with(&format!("{cut} 2 waits for rank 0 in #9")), "{text}");
        assert!(!text.contains("rank 2 (process"), "{text}");
        // One of three hosts.
        let three = [
            on("h0", 0, 9, &[2], 2),
            on("h0", 1, 9, &[3], 2),
            on("h1", 2, 9, &[0], 2),
            on("h2", 3, 9, &[1], 2),
        ];
        let text = report(&three, &[], 100.0);
        assert!(
            text.contains("hosts h0 and h1 do not") && text.contains("hosts h0 and h2 do not"),
            "{text}"
        );
        assert!(!text.contains("h1 and h2"), "{text}");
        // Vendor collectives do not report their messages.
        let text = report(
            &[vendor("h0", 0), vendor("h0", 1), vendor("h1", 2), vendor("h1", 3)],
            &[],
            100.0,
        );
        assert!(text.starts_with(cut), "{text}");
        let past = [
            vendor("h0", 0),
            vendor("h0", 1),
            moved_on(on("h1", 2, 10, &[1, 3], 1)),
            moved_on(on("h1", 3, 10, &[2, 0], 1)),
        ];
        let text = report(&past, &[], 100.0);
        assert!(text.starts_with(&format!("{cut} 0 waits for rank 2 in #9")), "{text}");
        assert!(!text.contains("process"), "{text}");
        // Two pipeline stages that wait for each other's messages.
        let text = report(&[receives("h0", 0, 1), receives("h1", 1, 0)], &[], 100.0);
        assert!(text.starts_with(&format!("{cut} 0 waits for rank 1 in #9 recv")), "{text}");
    }

    #[test]
    fn hosts_are_blamed_only_for_messages() {
        let tree = |hosts: [&str; 4]| {
            let with: [&[usize]; 4] = [&[2], &[3], &[0], &[1]];
            (0..4).map(|rank| on(hosts[rank], rank, 9, with[rank], 2)).collect::<Vec<_>>()
        };
        let text = report(&tree(["h0"; 4]), &[], 100.0);
        assert!(text.starts_with("the job hangs: no rank is missing; ranks 0–3 wait"), "{text}");
        // A rank that is late explains the waits of the others.
        let mut late = tree(["h0", "h0", "h1", "h1"]);
        late[3] = state(3, true, None, None);
        late[2] = on("h1", 2, 9, &[3], 1);
        let text = report(&late, &[], 100.0);
        assert!(!text.contains("reach") && text.contains("hangs: rank 3 (process 103"), "{text}");
        // So do ranks that disagree on a collective.
        let recorders = [recorder(0, 9, &["a"]), recorder(2, 9, &["b"])];
        let text = report(&tree(["h0", "h0", "h1", "h1"]), &recorders, 100.0);
        assert!(!text.contains("reach") && text.contains("ranks disagree"), "{text}");
    }

    #[test]
    fn a_host_that_is_gone_is_named_once() {
        let mut ranks = [
            on("h0", 0, 9, &[2], 2),
            on("h0", 1, 9, &[3], 2),
            on("h1", 2, 9, &[0], 2),
            on("h1", 3, 9, &[1], 2),
        ];
        ranks[2].answers = false;
        ranks[3].answers = false;
        let text = report(&ranks, &[], 100.0);
        let wanted = "the job hangs: host h1 with ranks 2, 3 does not answer: rank 2 was last seen 12 s ago in #9 \
                      all_reduce of head; ranks 0, 1 wait in #9 all_reduce of head since 30 s";
        assert_eq!(text, wanted);
    }

    /// Running numbers of ranks in different groups cannot be compared.
    #[test]
    fn waits_are_followed_through_groups_and_messages() {
        // Ranks 0 and 1 are one stage, 2 and 3 the next; 3 computes, 2 waits for it, 0 for a
        // gradient of 2, 1 for 0.
        let ranks = [
            state(0, true, None, collective_of("pipeline", &[0, 2], 90, 7, RECV, Some(1))),
            state(1, true, None, collective_of("data", &[0, 1], 95, 8, "reduce_scatter", None)),
            state(2, true, None, collective_of("data", &[2, 3], 12, 5, "reduce_scatter", None)),
            state(3, true, collective_of("data", &[2, 3], 11, 4, "reduce_scatter", None), None),
        ];
        let text = report(&ranks, &[], 100.0);
        let wanted = "the job hangs: rank 3 (process 103 on node) has not joined #12: wait for data since 31 s; rank 2";
        assert!(text.starts_with(wanted), "{text}");
        for wanted in [
            "rank 2 waits in #12 reduce_scatter",
            "rank 0 waits in #90 recv",
            "rank 1 waits in #95",
        ] {
            assert!(text.contains(wanted), "{text}");
        }
        // A rank that computes, and that no rank waits for, is not a cause.
        let text = report(
            &[state(0, true, None, None), waiting(1), state(2, false, None, None)],
            &[],
            100.0,
        );
        assert!(text.contains("rank 0 (process 100 on node) has not joined"), "{text}");
        let alone = collective_of("data", &[1, 2], 3, 3, "barrier", None);
        let text = report(
            &[state(0, true, None, None), state(1, true, None, alone), state(2, false, None, None)],
            &[],
            100.0,
        );
        assert!(!text.contains("rank 0"), "{text}");
    }

    #[test]
    fn ranks_that_disagree_are_named() {
        let same = [recorder(0, 1, &["a", "b", "c"]), recorder(1, 1, &["a", "b"])];
        let text = report(&[waiting(0), waiting(1)], &same, 75.5);
        assert!(
            text.contains(
                "no rank is missing; ranks 0, 1 wait in #43 all_gather of wte since 5.5 s"
            ),
            "{text}"
        );
        let differ = [recorder(0, 1, &["a", "b", "c"]), recorder(1, 1, &["a", "x", "y"])];
        let text = report(&[waiting(0), waiting(1)], &differ, 75.5);
        assert!(text.contains("ranks disagree: rank 0 made #2 b, rank 1 #2 x;"), "{text}");
    }

    #[test]
    fn many_ranks_are_described_briefly() {
        assert_eq!(list(&[0, 2, 3, 4, 7, 8, 10]), "0, 2–4, 7, 8, 10");
        let ranks: Vec<_> = (0..50).map(|rank| state(rank, false, None, None)).collect();
        let text = report(&ranks, &[], 100.0);
        assert!(
            text.matches("does not answer").count() == DESCRIBED
                && text.ends_with("; 42 more like these")
        );
    }
}
