//! Faults that tests plant: a process of a debug build kills itself at a named point of its work.
//!
//! `HPCTRAIN_FAULT_AT=POINT:STEP:RANK:FILE` kills the process that is rank `RANK` (`*`: any)
//! when it reaches `POINT` in step `STEP` or later, and creates `FILE`, so that the fault happens
//! once in a job.
//!
//! `HPCTRAIN_SLOW_RANK=RANK:MS,…` makes these ranks take this many milliseconds longer for each forward
//! of a micro-batch.
//! Release builds have no such points.

#[cfg(debug_assertions)]
mod planted {
    use std::path::PathBuf;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    use std::time::Duration;

    /// The environment variable that plants a fault.
    const VARIABLE: &str = "HPCTRAIN_FAULT_AT";

    static STEP: AtomicU64 = AtomicU64::new(0);
    static RANK: AtomicUsize = AtomicUsize::new(usize::MAX);

    struct Fault {
        point: String,
        step: u64,
        rank: Option<usize>,
        file: PathBuf,
    }

    fn parse(text: &str) -> Option<Fault> {
        let mut words = text.splitn(4, ':');
        Some(Fault {
            point: words.next()?.into(),
            step: words.next()?.parse().ok()?,
            rank: match words.next()? {
                "*" => None,
                rank => Some(rank.parse().ok()?),
            },
            file: words.next()?.into(),
        })
    }

    pub fn at(rank: usize, step: u64) {
        RANK.store(rank, Ordering::Relaxed);
        STEP.store(step, Ordering::Relaxed);
    }

    /// The environment variable that slows ranks down.
    const SLOW: &str = "HPCTRAIN_SLOW_RANK";

    fn slow_down() {
        static MILLISECONDS: OnceLock<Vec<(usize, u64)>> = OnceLock::new();
        let of_ranks = MILLISECONDS.get_or_init(|| {
            let parse = |text: &str| {
                let (rank, ms) = text.split_once(':')?;
                Some((rank.parse().ok()?, ms.parse().ok()?))
            };
            std::env::var(SLOW).unwrap_or_default().split(',').filter_map(parse).collect()
        });
        let here = RANK.load(Ordering::Relaxed);
        for (_, ms) in of_ranks.iter().filter(|(rank, _)| *rank == here) {
            std::thread::sleep(Duration::from_millis(*ms));
        }
    }

    pub fn point(name: &str) {
        if name == "forward" {
            slow_down();
        }
        static FAULTS: OnceLock<Vec<Fault>> = OnceLock::new();
        let faults = FAULTS.get_or_init(|| {
            std::env::var(VARIABLE).unwrap_or_default().split(',').filter_map(parse).collect()
        });
        for fault in faults {
            let (point, panics) = match fault.point.strip_suffix('!') {
                Some(point) => (point, true),
                None => (&fault.point[..], false),
            };
            let is_here = point == name
                && STEP.load(Ordering::Relaxed) >= fault.step
                && fault.rank.is_none_or(|rank| RANK.load(Ordering::Relaxed) == rank);
            if is_here && std::fs::File::create_new(&fault.file).is_ok() {
                assert!(!panics, "a planted fault");
                // It is the end of this process.
                let this = rustix::process::getpid();
                let _ = rustix::process::kill_process(this, rustix::process::Signal::KILL);
                std::thread::sleep(Duration::from_secs(60));
            }
        }
    }
}

/// Notes which rank this process is, and the step that it is in.
#[inline]
pub fn at(rank: usize, step: u64) {
    #[cfg(debug_assertions)]
    planted::at(rank, step);
    #[cfg(not(debug_assertions))]
    let _ = (rank, step);
}

/// Marks a point at which a test may kill this process.
#[inline]
pub fn point(name: &str) {
    #[cfg(debug_assertions)]
    planted::point(name);
    #[cfg(not(debug_assertions))]
    let _ = name;
}
