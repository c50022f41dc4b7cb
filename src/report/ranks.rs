//! Compute times of ranks, or of the workers of a run with parameter servers.

use std::collections::BTreeMap;

use super::html::{digits, escaped, muted};
use crate::run_records::RunRecords;
use hpctrain_config::telemetry::rank_times::{RankTimes, Spread};
use hpctrain_config::telemetry::straggler::slow_ranks;

/// The maximum number of ranks that are shown; of more, the slowest.
const MOST: usize = 64;

/// A bar: a rank, a quantile or a worker, with its time.
struct Rank {
    name: String,
    /// The compute time in milliseconds.
    ms: f64,
    is_slow: bool,
    tooltip: String,
}

/// Returns the chart of a run's ranks or workers.
pub fn section(run: &RunRecords) -> String {
    if !run.worker_records.is_empty() {
        return workers(run);
    }
    let windows = &run.rank_times;
    let ranks = windows.last().map_or(0, RankTimes::ranks);
    if ranks == 0 {
        return match run.mesh().ranks() {
            1 => String::new(),
            _ => muted(&format!(
                "The times of ranks are recorded every log.straggler_window = {} steps.",
                run.config.log.straggler_window
            )),
        };
    }
    // The run may have been resumed with other numbers of ranks, or of their virtual ranks.
    let virtual_ranks = windows.last().map_or(&[][..], |window| &window.virtual_ranks);
    let is_like_last =
        |window: &&RankTimes| window.ranks() == ranks && window.virtual_ranks == virtual_ranks;
    let windows: Vec<&RankTimes> = windows.iter().filter(is_like_last).collect();
    let spreads: Vec<&Spread> =
        windows.iter().filter_map(|window| window.spread.as_ref()).collect();
    if !spreads.is_empty() {
        return quantile_chart(run, &spreads);
    }
    let steps = windows.iter().map(|window| window.steps).fold(0, u64::saturating_add);
    let sums: Vec<f64> = (0..ranks)
        .map(|rank| {
            windows.iter().map(|window| window.compute_ms[rank] * window.steps as f64).sum::<f64>()
        })
        .collect();
    let mesh = run.mesh();
    let factor = run.config.log.straggler_factor;
    let comparable = if mesh.ranks() == ranks { mesh.data().max(1) } else { ranks };
    let seconds: Vec<f64> = sums.iter().map(|ms| ms * 1e-3).collect();
    let mut is_slow = vec![false; ranks];
    for straggler in slow_ranks(&seconds, (comparable, virtual_ranks), factor, steps) {
        is_slow[straggler.rank] = true;
    }
    let host = |rank: usize| {
        run.summary.as_ref().filter(|card| card.hosts.len() == ranks).map(|card| &card.hosts[rank])
    };
    let slowest =
        |rank: usize| windows.iter().map(|window| window.compute_ms[rank]).fold(0.0, f64::max);
    let tooltip = |rank: usize| {
        let count = virtual_ranks
            .get(rank)
            .map_or(String::new(), |count| format!(", {count} virtual ranks"));
        format!("slowest window {} ms{count}", digits(Some(slowest(rank))))
    };
    let shown: Vec<Rank> = (0..ranks)
        .map(|rank| Rank {
            name: host(rank)
                .map_or_else(|| format!("rank {rank}"), |host| format!("rank {rank}, {host}")),
            ms: sums[rank] / steps.max(1) as f64,
            is_slow: is_slow[rank],
            tooltip: tooltip(rank),
        })
        .collect();
    let per = if virtual_ranks.is_empty() { "" } else { ", per virtual rank" };
    let note = format!(
        "Compute time of each rank in milliseconds per step, without waits for messages and data, over {} windows of steps. Red bars \
         exceed {factor} times the median rank of their stage{per}.",
        windows.len()
    );
    bars(shown) + &muted(&note)
}

/// Returns the chart of a run with many ranks: quantiles, and the slowest ranks of each window.
fn quantile_chart(run: &RunRecords, windows: &[&Spread]) -> String {
    let count = windows.len() as f64;
    let quantiles = ["fastest", "10 %", "median", "90 %", "slowest"].into_iter().enumerate();
    let quantiles: Vec<Rank> = quantiles
        .map(|(index, name)| Rank {
            name: name.into(),
            ms: windows.iter().map(|window| window.quantiles_ms[index]).sum::<f64>() / count,
            is_slow: false,
            tooltip: format!("mean over {} windows", windows.len()),
        })
        .collect();
    let median = quantiles[2].ms;
    let mut of_ranks: BTreeMap<usize, (f64, usize)> = BTreeMap::new();
    for (rank, ms) in windows.iter().flat_map(|window| &window.slowest_ms) {
        let (sum, times) = of_ranks.entry(*rank).or_default();
        (*sum, *times) = (*sum + ms, *times + 1);
    }
    let hosts = run.summary.as_ref().map_or(&[][..], |card| &card.hosts);
    let slowest = of_ranks.into_iter().map(|(rank, (sum, times))| {
        let ms = sum / times as f64;
        Rank {
            name: hosts
                .get(rank)
                .map_or_else(|| format!("rank {rank}"), |host| format!("rank {rank}, {host}")),
            ms,
            is_slow: ms >= run.config.log.straggler_factor * median,
            tooltip: format!("among the slowest in {times} of {} windows", windows.len()),
        }
    });
    let note = format!(
        "Compute time in milliseconds per step, without waits for messages and data, over {} windows of steps: quantiles over all {} \
         ranks, and the ranks that were among the slowest of a window.",
        windows.len(),
        windows[0].ranks
    );
    bars(quantiles) + &bars(slowest.collect()) + &muted(&note)
}

/// Returns the chart of the workers of a run with parameter servers.
fn workers(run: &RunRecords) -> String {
    let mut of_workers: BTreeMap<&str, (f64, u64, u64, u64)> = BTreeMap::new();
    for given in &run.worker_records {
        let (ms, gradients, samples, staleness) = of_workers.entry(&given.worker).or_default();
        *ms += given.compute_ms;
        (*gradients, *samples) = (*gradients + 1, samples.saturating_add(given.samples));
        *staleness = staleness.saturating_add(given.staleness.unwrap_or(0));
    }
    let workers = of_workers.into_iter().map(|(name, (ms, gradients, samples, staleness))| Rank {
        name: format!("worker {name}"),
        ms: ms / samples.max(1) as f64,
        is_slow: false,
        tooltip: format!(
            "{gradients} gradients, mean staleness {:.2}",
            staleness as f64 / gradients.max(1) as f64
        ),
    });
    let note = "Compute time of each worker in milliseconds per sample.";
    bars(workers.collect()) + &muted(note)
}

/// Returns a bar for each rank.
fn bars(mut ranks: Vec<Rank>) -> String {
    let all = ranks.len();
    if all > MOST {
        ranks.sort_by(|one, other| other.ms.total_cmp(&one.ms));
        ranks.truncate(MOST);
    }
    let longest = ranks.iter().map(|rank| rank.ms).fold(f64::MIN_POSITIVE, f64::max);
    let mut out = String::from("<div class=\"bars\">\n");
    for Rank { name, ms, is_slow, tooltip } in &ranks {
        out += &format!(
            "<span class=\"name\">{}</span><span class=\"track\" title=\"{}\"><span class=\"bar{}\" \
             style=\"width:{:.2}%\"></span></span><span>{}</span>\n",
            escaped(name),
            escaped(tooltip),
            if *is_slow { " slow" } else { "" },
            100.0 * ms / longest,
            escaped(&digits(Some(*ms)))
        );
    }
    out += "</div>\n";
    if all > MOST {
        out += &muted(&format!("The slowest {MOST} of {all}."));
    }
    out
}
