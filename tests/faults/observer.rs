//! A reader who looks at a run's checkpoints all the time, as other programs may.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use hpctrain::checkpoint::Reader;

/// The observations of one observer.
#[derive(Debug, Default)]
pub struct Seen {
    /// Looks at the directory.
    pub looks: u64,
    /// Checkpoints read to their last byte.
    pub verified: u64,
    /// Times that `latest` was followed to a checkpoint.
    pub latest: u64,
    /// Observations that must never be made.
    pub wrong: Vec<String>,
}

/// A thread that reads.
pub struct Observer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Seen>,
}

impl Observer {
    /// Begins to look at the directory `checkpoints`, which need not exist yet.
    pub fn of(checkpoints: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut seen = Seen::default();
            while !stopped.load(Ordering::Relaxed) {
                look(&checkpoints, &mut seen);
                // The job needs the cores as well.
                std::thread::sleep(Duration::from_millis(5));
            }
            seen
        });
        Self { stop, thread }
    }

    /// Ends it; panics if it saw anything that was not whole.
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

/// Reads a checkpoint. What is wrong with it counts if it still should be there.
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
