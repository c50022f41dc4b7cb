//! The report: the cost of the losses, and the bits that they changed.

use serde::Serialize;

use super::comparison::ChaosComparison;
use super::disturbance::Strike;
use super::options::ChaosOptions;
use crate::config::Config;
use crate::data::inspect::table;
use crate::error::{Error, Result};
use crate::run_dir::RunDirectory;
use crate::telemetry::elastic::{self, Change};
use crate::telemetry::goodput::{Goodput, Pauses};
use crate::telemetry::{grouped, unix_time};

/// The result of `hpctrain verify --chaos`, and the JSON object of `--json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChaosReport {
    /// The display name of the configuration.
    pub network: String,
    /// The number of ranks at the start.
    pub ranks: usize,
    /// The number of virtual ranks.
    pub virtual_ranks: usize,
    /// The last step of both runs.
    pub steps: u64,
    /// The number of ranks that were killed.
    pub kills: usize,
    /// The number of ranks that were stopped.
    pub stops: usize,
    /// The number of processes that joined.
    pub joins: usize,
    /// The number of steps that were taken again.
    pub steps_again: u64,
    /// The times from a kill until the run continued.
    pub after_kills: Option<Recovery>,
    /// The times from a stop until the run continued, with the time in which the rank had to answer.
    pub after_stops: Option<Recovery>,
    /// The goodput of the run with losses.
    pub goodput: Option<Goodput>,
    /// The changes of the ranks.
    pub changes: Vec<Change>,
    /// Whether the runs have the same bits.
    pub agrees: bool,
    /// The comparison with the undisturbed run.
    pub comparison: ChaosComparison,
}

/// Times from a loss until the run continued, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Recovery {
    /// The number of losses.
    pub losses: usize,
    /// The median.
    pub median: f64,
    /// The longest.
    pub longest: f64,
}

impl Recovery {
    /// Returns the median and the longest of some times; `None` of none.
    fn from_times(mut seconds: Vec<f64>) -> Option<Self> {
        seconds.sort_by(f64::total_cmp);
        let longest = *seconds.last()?;
        Some(Self { losses: seconds.len(), median: seconds[seconds.len() / 2], longest })
    }

    /// Returns the text of a line.
    fn line(self, what: &str) -> String {
        let Self { losses, median, longest } = self;
        format!("{losses} after {what}: median {median:.2} s, longest {longest:.2} s")
    }
}

impl ChaosReport {
    /// Reads the records of the run that lost ranks.
    ///
    /// # Errors
    /// Returns an error if a record cannot be read, or the run has saved no checkpoint.
    pub fn new(
        name: &str,
        options: &ChaosOptions,
        config: &Config,
        run: &RunDirectory,
        strikes: &[Strike],
    ) -> Result<Self> {
        let changes = elastic::read(run.path())?;
        let Some(steps) = run.checkpoints().last_step()? else {
            return Err(Error::damaged(format!("{} has no checkpoint", run.path().display())));
        };
        let metrics = run.metrics_path();
        let goodput = Goodput::measure(run.path(), &metrics, unix_time(), Pauses::default())?;
        let again = |change: &Change| change.step - change.resumed.min(change.step);
        let stops = strikes.iter().filter(|strike| strike.is_stop).count();
        Ok(Self {
            network: name.to_owned(),
            ranks: options.ranks,
            virtual_ranks: config.parallel.virtual_ranks.unwrap_or(options.ranks),
            steps,
            kills: strikes.len() - stops,
            stops,
            joins: changes.iter().map(|change| change.joined).sum(),
            steps_again: changes.iter().map(again).sum(),
            after_kills: Recovery::from_times(recoveries(&changes, strikes, false)),
            after_stops: Recovery::from_times(recoveries(&changes, strikes, true)),
            goodput,
            changes,
            agrees: false,
            comparison: ChaosComparison::default(),
        })
    }

    /// Compares the run with the one that lost no rank.
    ///
    /// # Errors
    /// Returns an error if a file of a run cannot be read.
    pub fn compared_with(self, run: &RunDirectory, reference: &RunDirectory) -> Result<Self> {
        let comparison = ChaosComparison::new(run, reference, self.steps)?;
        Ok(Self { agrees: comparison.differing == 0, comparison, ..self })
    }

    /// Returns true if the runs have the same bits.
    pub fn agrees(&self) -> bool {
        self.agrees
    }

    /// Returns the lines about the run that lost ranks.
    pub fn disturbed(&self) -> String {
        let count = |n: usize, one: &str| format!("{n} {one}{}", if n == 1 { "" } else { "s" });
        let mut text = format!("\n{}\n", changes_table(&self.changes));
        text += &format!(
            "losses       {}, {}, {}; {} of {} steps taken again\n",
            count(self.kills, "kill"),
            count(self.stops, "stop"),
            count(self.joins, "join"),
            self.steps_again,
            grouped(self.steps)
        );
        let lines = [(self.after_kills, "kills"), (self.after_stops, "stops")];
        for (recovery, what) in lines {
            if let Some(recovery) = recovery {
                text += &format!("recovery     {}\n", recovery.line(what));
            }
        }
        if let Some(goodput) = &self.goodput {
            text += &format!("goodput      {goodput}\n");
        }
        text.trim_end().to_owned()
    }

    /// Returns the lines about the comparison.
    pub fn compared(&self) -> String {
        let ChaosComparison { steps, tensors, elements, differing, differences } = &self.comparison;
        let compared = format!(
            "compared     {} steps, {tensors} tensors with {} elements, with {} ranks without losses",
            grouped(*steps as u64),
            grouped(*elements),
            self.ranks
        );
        if *differing == 0 {
            return format!("{compared}: 0 differing bits");
        }
        let plural = if *differing == 1 { "" } else { "s" };
        let mut text = format!("{compared}: {differing} difference{plural}");
        differences.iter().for_each(|line| text += &format!("\n  {line}"));
        text
    }
}

/// Returns the times from losses until the run continued: of those that began with a stop, or those
/// that began with a kill. A loss that begins before the run has continued from another one belongs
/// to that one.
fn recoveries(changes: &[Change], strikes: &[Strike], of_stops: bool) -> Vec<f64> {
    let mut after = f64::NEG_INFINITY;
    let mut seconds = Vec::new();
    for change in changes.iter().filter(|change| !change.lost.is_empty()) {
        let is_cause = |strike: &&Strike| (after..change.time).contains(&strike.time);
        if let Some(first) = strikes.iter().find(is_cause)
            && first.is_stop == of_stops
        {
            seconds.push(change.time - first.time);
        }
        after = change.time;
    }
    seconds
}

/// Returns a table of the changes of the ranks.
fn changes_table(changes: &[Change]) -> String {
    let columns = [
        "membership",
        "ranks",
        "lost",
        "joined",
        "step",
        "again",
        "interrupt ms",
        "agree ms",
        "build ms",
    ];
    let mut rows = vec![columns.map(str::to_owned)];
    rows.extend(changes.iter().map(|change| {
        let lost: Vec<String> = change.lost.iter().map(|lost| lost.rank.to_string()).collect();
        [
            change.membership.to_string(),
            format!("{} → {}", change.ranks_before, change.ranks),
            lost.join(", "),
            change.joined.to_string(),
            change.resumed.to_string(),
            (change.step - change.resumed.min(change.step)).to_string(),
            format!("{:.0}", change.ms.interrupt),
            format!("{:.0}", change.ms.agree),
            format!("{:.0}", change.ms.build),
        ]
    }));
    table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::elastic::{ChangeTimes, LostMember};

    fn change(time: f64, lost: &[usize]) -> Change {
        let member =
            |rank: &usize| LostMember { rank: *rank, host: "a".into(), why: "killed".into() };
        Change {
            membership: 2,
            time,
            ranks_before: 4,
            ranks: 4 - lost.len(),
            hosts: vec!["a".into(); 4 - lost.len()],
            lost: lost.iter().map(member).collect(),
            joined: usize::from(lost.is_empty()),
            step: 9,
            resumed: 8,
            ms: ChangeTimes { interrupt: 1.0, agree: 2.4, build: 30.0 },
        }
    }

    fn strike(time: f64, is_stop: bool) -> Strike {
        Strike { time, pid: 7, is_stop }
    }

    #[test]
    fn times_are_from_the_first_loss_until_the_run_continues() {
        let changes = [change(10.5, &[1]), change(12.0, &[]), change(23.0, &[0, 2])];
        let strikes = [strike(10.0, false), strike(20.0, true), strike(20.25, false)];
        assert_eq!(recoveries(&changes, &strikes, false), [0.5]);
        assert_eq!(recoveries(&changes, &strikes, true), [3.0]);
        let recovery = Recovery::from_times(vec![3.0, 0.5, 1.0]).unwrap();
        assert_eq!(recovery.line("kills"), "3 after kills: median 1.00 s, longest 3.00 s");
        assert_eq!(Recovery::from_times(vec![]), None);
    }

    #[test]
    fn a_change_is_a_row() {
        let table = changes_table(&[change(1.0, &[1, 3])]);
        let row: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(row, ["2", "4", "→", "2", "1,", "3", "0", "8", "1", "1", "2", "30"]);
    }
}
