//! The report of the doctor: a table of the findings of all ranks.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;

use super::ranks::{self, RankResources};
use super::{Check, CheckStatus, Facts};

/// The report of the doctor, which is the same on every rank.
#[derive(Debug, Serialize)]
pub struct DoctorReport {
    checks: Vec<Line>,
    ranks: Vec<RankResources>,
}

/// A check, and the ranks with this finding.
#[derive(Debug, Serialize)]
struct Line {
    #[serde(flatten)]
    check: Check,
    ranks: Vec<usize>,
    /// Whether other ranks had another finding, or other nodes none.
    #[serde(skip)]
    partial: bool,
}

impl DoctorReport {
    /// Creates the report of the findings of all ranks.
    pub(super) fn new(facts: Vec<Facts>) -> Self {
        let infos: Vec<RankResources> = facts.iter().map(|facts| facts.resources.clone()).collect();
        let section = |checks: fn(&Facts) -> &Vec<Check>| {
            merge(&facts.iter().map(checks).collect::<Vec<_>>(), &infos)
        };
        let mut checks = section(|facts| &facts.devices);
        checks.extend(section(|facts| &facts.messages));
        let all: Vec<usize> = (0..infos.len()).collect();
        let of_all = ranks::checks(&infos).into_iter();
        checks.extend(of_all.map(|check| Line { check, ranks: all.clone(), partial: false }));
        checks.extend(section(|facts| &facts.node));
        Self { checks, ranks: infos }
    }

    /// Returns true if a check failed.
    pub fn has_failures(&self) -> bool {
        self.checks.iter().any(|line| line.check.finding.status == CheckStatus::Failure)
    }
}

/// Merges the checks of all ranks: checks of the same name are adjacent, and equal ones are one
/// line.
fn merge(by_rank: &[&Vec<Check>], infos: &[RankResources]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for (rank, check) in
        by_rank.iter().enumerate().flat_map(|(rank, checks)| checks.iter().map(move |c| (rank, c)))
    {
        if let Some(line) = lines.iter_mut().find(|line| line.check == *check) {
            line.ranks.push(rank);
            continue;
        }
        let after = lines
            .iter()
            .rposition(|line| line.check.name == check.name)
            .map_or(lines.len(), |last| last + 1);
        lines.insert(after, Line { check: check.clone(), ranks: vec![rank], partial: false });
    }
    let hosts = |ranks: &[usize]| {
        ranks.iter().map(|&rank| infos[rank].host.clone()).collect::<BTreeSet<_>>().len()
    };
    let all = hosts(&(0..infos.len()).collect::<Vec<_>>());
    let names: Vec<String> = lines.iter().map(|line| line.check.name.clone()).collect();
    for line in &mut lines {
        let several = names.iter().filter(|name| **name == line.check.name).count() > 1;
        line.partial = several || hosts(&line.ranks) < all;
    }
    lines
}

/// Formats ranks as `0-2,5`.
fn listed(ranks: &[usize]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    runs.collect::<Vec<_>>().join(",")
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.checks.iter().map(|line| line.check.name.len()).max().unwrap_or(0);
        for (at, Line { check: Check { name, finding }, ranks, partial }) in
            self.checks.iter().enumerate()
        {
            let sign = match finding.status {
                CheckStatus::Ok => '✓',
                CheckStatus::Warning => '!',
                CheckStatus::Failure => '✗',
            };
            let who = match partial {
                true => format!("rank {} on {}: ", listed(ranks), self.ranks[ranks[0]].host),
                false => String::new(),
            };
            // Some findings have several lines, such as compiler errors or the GPU of each rank.
            let found =
                finding.found.replace('\n', &format!("\n{:indent$}", "", indent = width + 4));
            write!(f, "{}{sign} {name:<width$}  {who}{found}", if at > 0 { "\n" } else { "" })?;
            if let Some(hint) = &finding.hint {
                write!(f, "\n  hint: {hint}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::Finding;
    use super::*;

    fn facts(host: &str, devices: &[Check]) -> Facts {
        let cores = BTreeSet::from([0, 1]);
        let seat = RankResources {
            host: host.into(),
            local_rank: 0,
            cores,
            spare_cores: false,
            gpu: None,
        };
        Facts { resources: seat, devices: devices.to_vec(), messages: vec![], node: vec![] }
    }

    #[test]
    fn equal_findings_of_ranks_are_one_line() {
        let driver = Finding::ok("13.0").named("driver");
        let nvrtc = Finding::warning("none", "get it").named("nvrtc");
        let old = Finding::ok("12.0").named("driver");
        let report = DoctorReport::new(vec![
            facts("a", &[driver.clone(), nvrtc.clone()]),
            facts("a", &[driver.clone(), nvrtc]),
        ]);
        assert!(
            report
                .to_string()
                .starts_with("✓ driver  13.0\n! nvrtc   none\n  hint: get it\n✓ ranks   2 on a\n"),
            "{report}"
        );
        let report = DoctorReport::new(vec![
            facts("a", std::slice::from_ref(&driver)),
            facts("a", &[driver]),
            facts("b", &[old]),
        ]);
        let text = report.to_string();
        assert!(
            text.starts_with("✓ driver  rank 0-1 on a: 13.0\n✓ driver  rank 2 on b: 12.0\n"),
            "{text}"
        );
        assert!(!report.has_failures());
        let failed = Finding::failure("gone", "call").named("driver");
        let report = DoctorReport::new(vec![facts("a", &[]), facts("b", &[failed])]);
        assert!(
            report.has_failures() && report.to_string().starts_with("✗ driver  rank 1 on b: gone"),
            "{report}"
        );
    }

    #[test]
    fn ranks_are_listed_in_runs() {
        assert_eq!(listed(&[0, 1, 2, 5]), "0-2,5");
        assert_eq!(listed(&[3]), "3");
    }
}
