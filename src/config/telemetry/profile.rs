//! `--profile`: the time that steps of rank 0 spent in each kernel, as a table and `profile.json`.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::Serialize;

use super::times::Times;
use hpctrain_base::error::{Error, Result};
use hpctrain_base::own_files;
use hpctrain_device::{KernelStats, KernelTotals};

/// The time of all launches of a kernel.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Kernel {
    /// The name, such as `norm, backward`.
    pub kernel: String,
    /// The number of launches.
    pub calls: u64,
    /// The total time of the launches.
    pub seconds: f64,
    /// The fraction of the compute and updates of steps.
    pub of_compute: f64,
    /// The number of multiplications and additions; `None` for kernels that only move memory.
    pub flops: Option<f64>,
    /// The rate of these in GFLOP/s.
    pub gflops_per_second: Option<f64>,
    /// The number of bytes to read and write, counting each operand once.
    pub bytes: f64,
    /// The rate of these in GB/s.
    pub gigabytes_per_second: f64,
    /// The launches by sizes, the longest total time first.
    pub shapes: Vec<KernelShape>,
}

/// The launches of a kernel with the same sizes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelShape {
    /// The sizes, in the order of the kernel's arguments.
    pub sizes: Vec<usize>,
    /// The number of launches.
    pub calls: u64,
    /// The total time of the launches.
    pub seconds: f64,
    /// The time of the fastest launch.
    pub fastest: f64,
}

/// The time of the calls of a hook for one event.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HookTime {
    /// The name of the hook.
    pub hook: String,
    /// The event, such as `step` or `evaluation`.
    pub event: &'static str,
    /// The number of calls.
    pub calls: u64,
    /// The total time of the calls.
    pub seconds: f64,
    /// The time of the slowest call.
    pub slowest: f64,
}

/// The profile of a run on rank 0.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelReport {
    /// The number of profiled steps: all but the first on a device, which loads the kernels.
    pub steps: u64,
    /// The number of compute threads.
    pub threads: usize,
    /// Whether the profile synchronised with the device after every kernel.
    pub waits_for_kernels: bool,
    /// The seconds of compute and updates of the steps.
    pub compute_seconds: f64,
    /// The seconds of these that were spent between kernels.
    pub other_seconds: f64,
    /// The kernels, the longest total time first.
    pub kernels: Vec<Kernel>,
    /// The hooks, the longest total time first. Their time is not a part of that of the steps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<HookTime>,
}

impl Kernel {
    /// Creates the row of a kernel with the totals `tally` in steps that computed for
    /// `compute_seconds`.
    fn new(
        kernel: &str,
        tally: &KernelStats,
        shapes: Vec<KernelShape>,
        compute_seconds: f64,
    ) -> Self {
        let rate = |amount: f64| amount / tally.seconds.max(f64::MIN_POSITIVE) / 1e9;
        let flops = (tally.flops > 0.0).then_some(tally.flops);
        Self {
            kernel: kernel.into(),
            calls: tally.calls,
            seconds: tally.seconds,
            of_compute: tally.seconds / compute_seconds.max(f64::MIN_POSITIVE),
            flops,
            gflops_per_second: flops.map(rate),
            bytes: tally.bytes,
            gigabytes_per_second: rate(tally.bytes),
            shapes,
        }
    }
}

impl KernelReport {
    /// Creates the profile of `steps` steps, which took `times`, from the `tallies` of kernels.
    pub fn new(
        tallies: &KernelTotals,
        steps: u64,
        times: Times,
        threads: usize,
        waits: bool,
    ) -> Self {
        let compute_seconds = times.compute + times.optimizer;
        let mut by_kernel: BTreeMap<&str, KernelStats> = BTreeMap::new();
        for ((kernel, _), tally) in tallies {
            by_kernel.entry(*kernel).and_modify(|all| *all = all.plus(*tally)).or_insert(*tally);
        }
        let mut kernels: Vec<Kernel> = by_kernel
            .iter()
            .map(|(kernel, tally)| {
                Kernel::new(kernel, tally, shapes(tallies, kernel), compute_seconds)
            })
            .collect();
        kernels.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        let counted: f64 = kernels.iter().map(|kernel| kernel.seconds).sum();
        let other_seconds = (compute_seconds - counted).max(0.0);
        let hooks = vec![];
        let waits_for_kernels = waits;
        Self { steps, threads, waits_for_kernels, compute_seconds, other_seconds, kernels, hooks }
    }

    /// Adds the times of hooks.
    #[must_use]
    pub fn with_hooks(self, mut hooks: Vec<HookTime>) -> Self {
        hooks.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
        Self { hooks, ..self }
    }

    /// Writes `profile.json`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)
            .map_err(|e| Error::internal(format!("profile: {e}")))?;
        own_files::write(path, text + "\n").map_err(|e| Error::io("write", path, e))
    }
}

/// Returns the launches of a kernel by their sizes.
fn shapes(tallies: &KernelTotals, kernel: &str) -> Vec<KernelShape> {
    let own = tallies.iter().filter(|((name, _), _)| *name == kernel);
    let mut shapes: Vec<KernelShape> = own
        .map(|((_, sizes), tally)| KernelShape {
            sizes: sizes.iter().copied().filter(|&size| size > 0).collect(),
            calls: tally.calls,
            seconds: tally.seconds,
            fastest: tally.fastest,
        })
        .collect();
    shapes.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
    shapes
}

/// Formats the profile as a table.
impl fmt::Display for KernelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<34} {:>8} {:>10} {:>8} {:>9} {:>8}",
            "kernel", "calls", "seconds", "compute", "GFLOP/s", "GB/s"
        )?;
        for kernel in &self.kernels {
            let Kernel {
                kernel,
                calls,
                seconds,
                of_compute,
                gflops_per_second,
                gigabytes_per_second,
                ..
            } = kernel;
            let flops = gflops_per_second.map_or("–".into(), |rate| format!("{rate:.1}"));
            writeln!(
                f,
                "{kernel:<34} {calls:>8} {seconds:>10.3} {:>6.1} % {flops:>9} {gigabytes_per_second:>8.1}",
                100.0 * of_compute
            )?;
        }
        let share = 100.0 * self.other_seconds / self.compute_seconds.max(f64::MIN_POSITIVE);
        write!(
            f,
            "{:<34} {:>8} {:>10.3} {share:>6.1} %",
            "between kernels", "", self.other_seconds
        )?;
        if !self.hooks.is_empty() {
            write!(f, "\n\n{:<34} {:>8} {:>10} {:>11}", "hook", "calls", "seconds", "slowest")?;
        }
        for HookTime { hook, event, calls, seconds, slowest } in &self.hooks {
            let name = format!("{hook} {event}");
            write!(f, "\n{name:<34} {calls:>8} {seconds:>10.3} {:>8.1} ms", 1e3 * slowest)?;
        }
        if self.waits_for_kernels {
            write!(
                f,
                "\nthe profile synchronised with the device after every kernel: the run was slower than without it"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the statistics of launches that took `seconds` in total.
    fn tally(calls: u64, seconds: f64, flops: f64, bytes: f64) -> KernelStats {
        KernelStats { calls, seconds, fastest: seconds, flops, bytes }
    }

    #[test]
    fn hooks_have_a_table_only_where_there_are_any() {
        let report = KernelReport::new(&BTreeMap::new(), 3, Times::default(), 1, false);
        assert!(!report.to_string().contains("hook"), "{report}");
        let hook = |event, seconds| HookTime {
            hook: "notes".into(),
            event,
            calls: 3,
            seconds,
            slowest: 0.0125,
        };
        let report = report.with_hooks(vec![hook("epoch", 0.01), hook("step", 0.5)]);
        let text = report.to_string();
        let lines: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("hook")).collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert!(lines[1].starts_with("notes step ") && lines[1].ends_with("12.5 ms"), "{text}");
        assert_eq!(lines[0].len(), lines[1].len(), "{text}");
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["hooks"][1]["event"], "epoch");
    }

    #[test]
    fn the_longest_comes_first_and_shares_add_up() {
        let tallies = BTreeMap::from([
            (("add", [4, 0, 0, 0]), tally(4, 0.5, 0.0, 1e9)),
            (("linear", [1, 2, 3, 0]), tally(1, 0.5, 2e9, 5e8)),
            (("linear", [2, 2, 3, 0]), tally(1, 1.5, 6e9, 5e8)),
        ]);
        let times = Times { compute: 3.0, optimizer: 1.0, loader: 5.0, ..Times::default() };
        let report = KernelReport::new(&tallies, 7, times, 2, true);
        assert_eq!(
            report.kernels.iter().map(|kernel| &kernel.kernel[..]).collect::<Vec<_>>(),
            ["linear", "add"]
        );
        let [linear, add] = &report.kernels[..] else { panic!("{report:?}") };
        assert_eq!((linear.gflops_per_second, linear.of_compute), (Some(4.0), 0.5));
        assert_eq!(
            linear.shapes.iter().map(|shape| &shape.sizes[..]).collect::<Vec<_>>(),
            [[2, 2, 3], [1, 2, 3]]
        );
        assert_eq!((add.flops, add.gflops_per_second, add.gigabytes_per_second), (None, None, 2.0));
        assert_eq!((report.compute_seconds, report.other_seconds), (4.0, 1.5));
        let text = report.to_string();
        assert!(
            text.contains(
                "linear                                    2      2.000   50.0 %       4.0"
            ),
            "{text}"
        );
        assert!(
            text.contains("between kernels") && text.contains("37.5 %\nthe profile synchronised"),
            "{text}"
        );
    }
}
