//! In-memory checkpoints of state on GPUs, and of state that is offloaded to the host.

use hpctrain_testkit::launch::Transport::Mpirun;
use hpctrain_testkit::launch::{LIMIT, finish, processes, rank_of, send, start};
use hpctrain_testkit::runs::Run;
use hpctrain_testkit::simulator::with_simulator;

const SETTINGS: [&str; 10] = [
    "run.device=cuda",
    "run.steps=16",
    "model.width=16",
    "model.context=8",
    "eval.samples=6",
    "checkpoint.every=0",
    "device.memory_limit=48MiB",
    "device.ranks_per_gpu=12",
    "precision.dtype=bf16",
    "parallel.zero=1",
];

#[test]
fn a_killed_job_continues_with_the_same_bits() {
    let root = tempfile::tempdir().unwrap();
    let dir = format!("memory_checkpoint.dir={}", root.path().display());
    let own = ["memory_checkpoint.every=1", &dir];
    for (number, settings) in
        [&["comm.transport=host-staged"][..], &["offload.optimizer=true"]].into_iter().enumerate()
    {
        let run = |name: &str| {
            let settings = [&SETTINGS[..], &own, settings].concat();
            Run::new(Mpirun(2), root.path(), &format!("{name}{number}"), &settings)
        };
        let whole = run("whole");
        finish(with_simulator(&mut whole.command())).succeeded();
        let killed = run("killed");
        let mut job = start(with_simulator(&mut killed.command()));
        let metrics = killed.files().path("metrics.jsonl");
        let steps = || std::fs::read_to_string(&metrics).unwrap_or_default().lines().count();
        job.until("training", || steps() >= 5);
        let all = processes(&format!("run.root={}", root.path().display()));
        all.into_iter()
            .filter(|pid| rank_of(*pid).is_some())
            .for_each(|pid| send(pid, libc::SIGKILL));
        job.finish(LIMIT);
        let recorded = steps();
        let again = killed.resume("auto");
        let ended = finish(with_simulator(&mut again.command())).succeeded();
        let line = ended.stdout.lines().find(|line| line.starts_with("resumed ")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let step: usize = words[3].parse().unwrap();
        assert!(words[5].contains("/hpctrain-") && step + 2 >= recorded, "{recorded}: {ended}");
        println!("{settings:?}: killed after step {recorded}, resumed at step {step}");
        again.files().same_as(&whole.files(), 16, &settings.join(" "));
    }
}
