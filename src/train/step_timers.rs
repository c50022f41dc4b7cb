//! Timers of one rank since the start of the process: steps, their time by activity, and the
//! profile of its kernels.

use std::time::{Duration, Instant};

use hpctrain_comm::Stats;
use hpctrain_config::telemetry::profile::KernelReport;
use hpctrain_config::telemetry::run_record::StepCounts;
use hpctrain_config::telemetry::times::{TimeCounters, Times};
use hpctrain_device::{KernelTotals, Profile};
use hpctrain_engine::StepResult;

/// The timers of one rank.
pub struct StepTimers {
    started: Instant,
    /// Milliseconds of each step.
    step_ms: Vec<f64>,
    /// Time in optimizer updates.
    updating: Duration,
    /// Time of the steps, by activity.
    times: Times,
    /// Steps in a row that were skipped, and in all.
    skipped: (u64, u64),
    /// The profile, if the rank measures the time of its kernels.
    profile: Option<Profiled>,
    /// The requests of the rank until the ends of the first and of the last round, with the steps
    /// until then.
    requested: Option<[(usize, Requested); 2]>,
}

/// The requests of a rank so far: launches, host waits, messages, and bytes sent.
pub type Requested = [u64; 4];

/// The steps in a profile, and their times.
#[derive(Default)]
struct Profiled {
    steps: u64,
    times: Times,
    tallies: KernelTotals,
}

impl StepTimers {
    /// Creates timers at zero. `profiles` is true if the rank measures the time of its kernels.
    pub fn new(started: Instant, profiles: bool) -> Self {
        Self {
            started,
            step_ms: Vec::new(),
            updating: Duration::ZERO,
            times: Times::default(),
            skipped: (0, 0),
            profile: profiles.then(Profiled::default),
            requested: None,
        }
    }

    /// Returns true if the rank measures the time of its kernels.
    pub fn profiles(&self) -> bool {
        self.profile.is_some()
    }

    /// Returns the present time counters. `loader` is the time spent waiting for the loader.
    pub fn counters(&self, comm: Stats, loader: Duration) -> TimeCounters {
        TimeCounters {
            total: self.started.elapsed().as_secs_f64(),
            blocked: comm.blocked,
            busy: comm.busy,
            loader: loader.as_secs_f64(),
            optimizer: self.updating.as_secs_f64(),
        }
    }

    /// Adds the result of a step.
    pub fn record_step(&mut self, step: &StepResult) {
        self.updating += step.update_time;
        self.skipped = if step.skipped() {
            (self.skipped.0 + 1, self.skipped.1 + 1)
        } else {
            (0, self.skipped.1)
        };
    }

    /// Adds a round of `steps` steps that took `seconds`. If `may_warm_up` is true, the profile
    /// ignores the first round: on a GPU it loads the kernels.
    pub fn record_round(
        &mut self,
        steps: usize,
        seconds: f64,
        times: Times,
        may_warm_up: bool,
        kernels: &Profile,
    ) {
        let is_first = self.step_ms.is_empty();
        self.step_ms.extend(std::iter::repeat_n(seconds * 1e3 / steps as f64, steps));
        self.times += times;
        let Some(profiled) = &mut self.profile else { return };
        let tallies = kernels.take();
        if may_warm_up && is_first {
            return;
        }
        profiled.steps += steps as u64;
        profiled.times += times;
        for (kernel, tally) in tallies {
            profiled
                .tallies
                .entry(kernel)
                .and_modify(|all| *all = all.plus(tally))
                .or_insert(tally);
        }
    }

    /// Records what the rank had requested at the end of a round.
    pub fn record_requests(&mut self, requested: Requested) {
        let now = (self.step_ms.len(), requested);
        let [first, _] = self.requested.unwrap_or([now; 2]);
        self.requested = Some([first, now]);
    }

    /// Returns what the rank has requested in a step, without the first round, which starts
    /// everything; `None` if there was no other.
    pub fn requests_per_step(&self) -> Option<StepCounts> {
        let [(first, before), (last, after)] = self.requested?;
        let steps = (last - first) as f64;
        let [launches, host_waits, messages, sent_bytes] =
            std::array::from_fn(|i| (after[i] - before[i]) as f64 / steps);
        (last > first).then_some(StepCounts { launches, host_waits, messages, sent_bytes })
    }

    /// Returns the number of consecutive steps that were skipped, up to the last one.
    pub fn skipped_in_a_row(&self) -> u64 {
        self.skipped.0
    }

    /// Returns the number of steps that were skipped.
    pub fn skipped(&self) -> u64 {
        self.skipped.1
    }

    /// Returns true if no step was taken.
    pub fn is_empty(&self) -> bool {
        self.step_ms.is_empty()
    }

    /// Returns the median step time in milliseconds, or infinity if no step was taken.
    pub fn median_ms(&self) -> f64 {
        let mut step_ms = self.step_ms.clone();
        step_ms.sort_by(f64::total_cmp);
        step_ms.get(step_ms.len() / 2).copied().unwrap_or(f64::INFINITY)
    }

    /// Returns the time of the steps, by activity.
    pub fn times(&self) -> Times {
        self.times
    }

    /// Returns the seconds since the start.
    pub fn seconds(&self) -> f64 {
        self.started.elapsed().as_secs_f64()
    }

    /// Returns the profile, if the rank measures the time of its kernels. `waits` is true if the
    /// rank waited for the device after each kernel.
    pub fn profile(&self, threads: usize, waits: bool) -> Option<KernelReport> {
        let Profiled { steps, times, tallies } = self.profile.as_ref()?;
        Some(KernelReport::new(tallies, *steps, *times, threads, waits))
    }
}
