//! A concurrent reader of a run's checkpoints, as other programs may be.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hpctrain::checkpoint::Reader;

/// The observations of one run.
#[derive(Debug, Default)]
pub struct Seen {
    /// The number of listings of the directory.
    pub looks: u64,
    /// The number of checkpoints read completely.
    pub verified: u64,
    /// The number of times that `latest` led to a checkpoint.
    pub latest: u64,
    /// Observations that must never happen.
    pub wrong: Vec<String>,
}

/// A thread that reads checkpoints.
pub struct Observer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Seen>,
}

impl Observer {
    /// Starts to read the directory `checkpoints`, which need not exist yet.
    pub fn start(checkpoints: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut seen = Seen::default();
            while !stopped.load(Ordering::Relaxed) {
                look(&checkpoints, &mut seen);
                // Leave cores for the job.
                std::thread::sleep(Duration::from_millis(5));
            }
            seen
        });
        Self { stop, thread }
    }

    /// Ends the thread; panics if it saw an invalid checkpoint.
    #[track_caller]
    pub fn finish(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        let seen = self.thread.join().unwrap();
        assert!(seen.wrong.is_empty(), "{seen:#?}");
        seen
    }
}

fn look(checkpoints: &Path, seen: &mut Seen) {
    seen.looks += 1;
    let latest = checkpoints.join("latest");
    if let Ok(target) = std::fs::read_link(&latest) {
        seen.latest += 1;
        check(&checkpoints.join(&target), seen, || {
            std::fs::read_link(&latest).is_ok_and(|now| now == target)
        });
    } else if seen.latest > 0 {
        seen.wrong.push("latest is gone".into());
    }
    let Ok(entries) = checkpoints.read_dir() else { return };
    let paths = entries.flatten().map(|entry| entry.path());
    let complete = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.strip_prefix("step-")
            .is_some_and(|step| step.len() == 8 && step.bytes().all(|byte| byte.is_ascii_digit()))
    };
    for path in paths.filter(complete) {
        let inode = || std::fs::metadata(&path).map(|of| of.ino()).ok();
        let before = inode();
        check(&path, seen, || before.is_some() && inode() == before);
    }
}

/// Reads a checkpoint. Errors count only if the checkpoint should still exist (`still`).
fn check(path: &Path, seen: &mut Seen, still: impl Fn() -> bool) {
    let verify = || {
        let mut reader = Reader::open(path)?;
        let files: Vec<String> = reader.manifest().files.keys().cloned().collect();
        files.iter().try_for_each(|file| reader.verify(file))
    };
    match verify() {
        Ok(()) => seen.verified += 1,
        Err(e) if still() => seen.wrong.push(format!("{}: {e}", path.display())),
        Err(_) => {}
    }
}
