//! SDC (silent data corruption) checks: a bit that changes in the memory of one rank during a run.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;

use crate::{LARGE, ranks};
use hpctrain_testkit::launch::Transport::{Mpirun, Simulate};
use hpctrain_testkit::launch::{LIMIT, send, start};
use hpctrain_testkit::runs::{Run, json, tensors};

/// The number of bytes that are read at once.
const CHUNK: usize = 64 << 20;

/// Finds the numbers `wanted`, within `tolerance`, in the memory of a process, and flips the lowest
/// bit of the second one at every place. Returns the number of places, or none if the system
/// forbids it.
pub fn flip(process: u32, wanted: &[f32], tolerance: f32) -> Option<usize> {
    let memory =
        OpenOptions::new().read(true).write(true).open(format!("/proc/{process}/mem")).ok()?;
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).ok()?;
    let mut found = 0;
    for line in maps.lines().filter(|line| line.contains(" rw-p ")) {
        let (first, last) = line.split_whitespace().next()?.split_once('-')?;
        let [first, last] = [first, last].map(|address| u64::from_str_radix(address, 16).unwrap());
        for start in (first..last).step_by(CHUNK) {
            let range = start..last.min(start + (CHUNK + size_of_val(wanted)) as u64);
            found += flip_within(&memory, range, wanted, tolerance);
        }
    }
    Some(found)
}

fn flip_within(
    memory: &File,
    range: std::ops::Range<u64>,
    wanted: &[f32],
    tolerance: f32,
) -> usize {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    // Some regions cannot be read.
    if memory.read_exact_at(&mut bytes, range.start).is_err() {
        return 0;
    }
    let values: Vec<f32> =
        bytes.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let is_close = |values: &[f32]| {
        values.iter().zip(wanted).all(|(value, wanted)| (value - wanted).abs() <= tolerance)
    };
    let places: Vec<usize> = (0..=values.len().saturating_sub(wanted.len()))
        .filter(|&at| is_close(&values[at..]))
        .collect();
    for at in &places {
        let flipped = values[at + 1].to_bits() ^ 1;
        memory.write_all_at(&flipped.to_le_bytes(), range.start + 4 * (*at as u64 + 1)).unwrap();
    }
    places.len()
}

/// Settings with which no step changes parameters, so their bits are those of any checkpoint.
const FROZEN: [&str; 5] = [
    "optimizer.lr=1e-38",
    "optimizer.weight_decay=0.0",
    "lr_schedule.warmup=0",
    "eval.every=0",
    "run.sdc_check_every=2",
];

#[test]
fn a_bit_that_changes_in_one_rank_ends_the_run_and_spoils_no_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    for (name, layout) in [("copies", &["parallel.zero=0"][..]), ("shards", &["parallel.zero=1"])] {
        let settings = [
            &LARGE[..],
            &FROZEN,
            layout,
            &["run.steps=100000", "checkpoint.every=7", "checkpoint.keep=9"],
        ]
        .concat();
        let run = Run::new(Mpirun(2), root.path(), name, &settings);
        let files = run.files();
        let mut job = start(&mut run.command());
        let latest = files.path("checkpoints/latest");
        job.until("saved", || latest.exists());
        let tensors = tensors(&latest);
        let (_, bits) = tensors.iter().find(|(tensor, _)| tensor.contains("wte.weight")).unwrap();
        let wanted: Vec<f32> = bits[..16].iter().map(|&bits| f32::from_bits(bits)).collect();
        // Rank 0 has the first shard; every rank has a copy.
        let number = usize::from(name == "copies");
        let rank = ranks(&run)[number];
        send(rank, libc::SIGSTOP);
        let flipped = flip(rank, &wanted, 0.0);
        send(rank, libc::SIGCONT);
        let Some(flipped) = flipped else {
            eprintln!("SKIPPED: this system lets no process change another's memory");
            return;
        };
        assert!(flipped > 0, "{name}: the parameters were not found");
        let ended = job.finish(LIMIT);
        assert_eq!(ended.code(), 1, "{name}: {ended}");
        let expected = format!("embedding on rank {number} on ");
        assert!(ended.stderr.contains(&expected), "{name}: {ended}");
        assert!(
            ended.stderr.contains("parameters or optimizer state have changed in memory"),
            "{name}: {ended}"
        );
        // Every published checkpoint has the bits from before the flip.
        for entry in files.path("checkpoints").read_dir().unwrap().flatten() {
            let step = entry
                .file_name()
                .to_string_lossy()
                .strip_prefix("step-")
                .and_then(|step| step.parse().ok());
            if let Some(step) = step {
                assert_eq!(
                    files
                        .tensors(step)
                        .iter()
                        .find(|(tensor, _)| tensor.contains("wte.weight"))
                        .unwrap()
                        .1,
                    *bits
                );
            }
        }
    }
}

#[test]
fn checks_that_are_rarer_than_kept_checkpoints_give_a_warning() {
    let root = tempfile::tempdir().unwrap();
    let warnings = |name: &str, more: &[&str]| {
        let settings =
            [&["run.steps=2", "eval.every=0", "checkpoint.every=2", "checkpoint.keep=3"], more]
                .concat();
        Run::new(Simulate(2), root.path(), name, &settings).ends().succeeded().stderr
    };
    let words = "run.sdc_check_every = 7 is more than checkpoint.keep × checkpoint.every = 6: an SDC check may mark all \
                 checkpoints but one as suspect, and that one may be 9 steps old; hint: run.sdc_check_every=6 or less";
    let rare = warnings("rare", &["run.sdc_check_every=7"]);
    assert_eq!(rare.matches(words).count(), 1, "{rare}");
    // No warning is printed if checks are as frequent as checkpoints are replaced, or with a single
    // replica.
    for (name, more) in [
        ("often", &["run.sdc_check_every=6"][..]),
        ("one", &["run.sdc_check_every=7", "parallel.zero=3"]),
    ] {
        let often = warnings(name, more);
        assert!(!often.contains("run.sdc_check_every"), "{often}");
    }
}

#[test]
fn checks_change_no_bit_and_suspect_checkpoints_are_skipped() {
    let root = tempfile::tempdir().unwrap();
    let settings = [&LARGE[..], &["run.steps=8", "eval.every=4", "optimizer.ema=0.9"]].concat();
    let plain = Run::new(Simulate(2), root.path(), "plain", &settings).succeeds();
    for (name, layout) in [
        ("audited", &["parallel.zero=0"][..]),
        ("shards", &["parallel.shard=2", "parallel.zero=1"]),
    ] {
        let audited = [&settings[..], &["run.sdc_check_every=3"], layout].concat();
        let files = Run::new(Simulate(4), root.path(), name, &audited).succeeds();
        files.same_as(&plain, 8, name);
    }
    let files = Run::new(Simulate(2), root.path(), "plain", &settings).files();
    std::fs::write(files.checkpoint(8).join("suspect"), "step 8: parameters of h.0 differ\n")
        .unwrap();
    let more = Run::new(Simulate(2), root.path(), "plain", &settings).resume("auto");
    let ended = more.ends().succeeded();
    assert!(
        ended.stderr.contains("step-00000008 is suspect: step 8: parameters of h.0 differ"),
        "{ended}"
    );
    assert!(!files.checkpoint(8).join("suspect").exists(), "it was written anew");
    assert_eq!(json(&files.path("END"))["step"], 8);
}
