//! Breakdown of the time of steps on one rank.
//!
//! Exposed communication is the time in `Pending::wait` (`Stats::blocked`). Hidden communication is
//! the time of the communication thread inside collectives (`Stats::busy`) less the exposed time.
//! Both include waits for late ranks, because a rank cannot distinguish a late peer from a slow
//! network; `telemetry::straggler` compares the compute times of the ranks instead.

use std::fmt;
use std::ops::{AddAssign, Div};

use serde::{Deserialize, Serialize};

/// The counters of the time that a rank has spent so far.
#[derive(Debug, Clone, Copy)]
pub struct TimeCounters {
    /// The seconds that have passed.
    pub total: f64,
    /// The seconds in which compute was blocked, waiting for messages.
    pub blocked: f64,
    /// The seconds that the communication thread spent in collectives, including waits for late
    /// ranks.
    pub busy: f64,
    /// The seconds spent waiting for data.
    pub loader: f64,
    /// The seconds spent in optimizer updates.
    pub optimizer: f64,
}

/// The breakdown of the seconds of one or more steps. All but `comm_hidden` add up to the total.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// The rest: forwards, backwards and sums.
    pub compute: f64,
    /// The time in which compute was blocked, waiting for messages.
    pub comm_exposed: f64,
    /// The time that the communication thread spent in collectives, including waits for late ranks,
    /// while compute continued. A collective counts for the step in which it ends, which may be the
    /// one after that which started it.
    pub comm_hidden: f64,
    /// The time spent waiting for data.
    pub loader: f64,
    /// The time spent updating the parameters that this rank owns.
    pub optimizer: f64,
}

impl Times {
    /// Returns the time spent between two readings of the counters.
    pub fn between(before: TimeCounters, after: TimeCounters) -> Self {
        let comm_exposed = after.blocked - before.blocked;
        let loader = after.loader - before.loader;
        let optimizer = after.optimizer - before.optimizer;
        // Clocks are read one after another: the delay between them must not make a time negative.
        let rest = |whole: f64, parts: f64| (whole - parts).max(0.0);
        Self {
            compute: rest(after.total - before.total, comm_exposed + loader + optimizer),
            comm_exposed,
            comm_hidden: rest(after.busy - before.busy, comm_exposed),
            loader,
            optimizer,
        }
    }

    /// Returns the total time.
    pub fn total(&self) -> f64 {
        self.compute + self.comm_exposed + self.loader + self.optimizer
    }
}

impl AddAssign for Times {
    fn add_assign(&mut self, other: Self) {
        self.compute += other.compute;
        self.comm_exposed += other.comm_exposed;
        self.comm_hidden += other.comm_hidden;
        self.loader += other.loader;
        self.optimizer += other.optimizer;
    }
}

/// Divides the times of several steps by their number: the mean of a step.
impl Div<f64> for Times {
    type Output = Self;

    fn div(self, steps: f64) -> Self {
        Self {
            compute: self.compute / steps,
            comm_exposed: self.comm_exposed / steps,
            comm_hidden: self.comm_hidden / steps,
            loader: self.loader / steps,
            optimizer: self.optimizer / steps,
        }
    }
}

/// Formats the parts as percentages of the total.
impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share =
            |part: f64| format!("{:.0} %", 100.0 * part / self.total().max(f64::MIN_POSITIVE));
        let Self { compute, comm_exposed, comm_hidden, loader, optimizer } = *self;
        write!(
            f,
            "compute {}, exposed communication {} (hidden {}), loader {}, optimizer {}",
            share(compute),
            share(comm_exposed),
            share(comm_hidden),
            share(loader),
            share(optimizer)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spent(total: f64, blocked: f64, busy: f64, loader: f64, optimizer: f64) -> TimeCounters {
        TimeCounters { total, blocked, busy, loader, optimizer }
    }

    #[test]
    fn parts_add_up_and_none_is_negative() {
        let before = spent(10.0, 1.0, 2.0, 0.5, 0.25);
        let times = Times::between(before, spent(14.0, 1.5, 3.5, 0.75, 0.5));
        let want = Times {
            compute: 3.0,
            comm_exposed: 0.5,
            comm_hidden: 1.0,
            loader: 0.25,
            optimizer: 0.25,
        };
        assert_eq!(times, want);
        assert_eq!(times.total(), 4.0);
        let mut twice = times;
        twice += times;
        assert_eq!(twice.total(), 8.0);
        assert_eq!(twice / 2.0, times);
        // A step that only waited, and was blocked longer than the collective took because its
        // thread woke up late.
        let times = Times::between(before, spent(11.0, 2.1, 2.5, 0.5, 0.25));
        assert_eq!((times.compute, times.comm_hidden), (0.0, 0.0));
    }

    #[test]
    fn shares_read_well() {
        let times = Times {
            compute: 3.0,
            comm_exposed: 0.5,
            comm_hidden: 1.0,
            loader: 0.25,
            optimizer: 0.25,
        };
        let want =
            "compute 75 %, exposed communication 12 % (hidden 25 %), loader 6 %, optimizer 6 %";
        assert_eq!(times.to_string(), want);
        assert!(Times::default().to_string().starts_with("compute 0 %"));
    }
}
