//! Runs the commands of the documentation, one after the other in a directory like a clone, with
//! settings that make them short.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use hpctrain_testkit::launch::{finish, mpirun};
use hpctrain_testkit::program;

/// Settings of a short run. It saves twice, so that another can start from its first checkpoint.
const RUN: &str = "--set run.steps=6 --set checkpoint.every=3 --set eval.every=3 --set eval.samples=8 \
                   --set lr_schedule.warmup=1 --set log.sample_tokens=0";

/// Settings of a narrow network with the number of layers of the pages, which trains fast.
const NARROW: &str = "--set model.width=32 --set model.heads=2 --set model.context=16";

/// Settings of a network that trains in an instant.
const SMALL: &str =
    "--set model.layers=1 --set model.width=32 --set model.heads=2 --set model.context=16";

/// Commands that need files that a clone does not have, and the tests that cover them.
const ELSEWHERE: [(&str, &str); 3] = [
    ("bench connection", "two hosts: tests/hosts/roles.rs"),
    ("hpctrain predict", "images that a user imports: tests/runs/predict.rs"),
    ("srun ", "a Slurm allocation: tests/cli/slurm.rs, and on a real Slurm tests/hosts/slurm.rs"),
];

/// Terms that people search for: each is in a heading or a row of a table on one of the first
/// pages.
const TERMS: [&str; 9] = [
    "CUDA-aware",
    "GPUDirect",
    "FSDP",
    "HSDP",
    "activation checkpointing",
    "master weights",
    "local SGD",
    "NCCL",
    "MFU",
];

/// Returns the text of a page of the repository.
fn page(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(name)).unwrap()
}

/// The heading of the commands in docs/running.md that follow one another in one directory.
const BY_TASK: &str = "\n## Commands by task\n";

/// The heading of the planner in docs/parallelism.md.
const PLANNER: &str = "\n## Planner: `hpctrain plan`\n";

/// Returns the section of commands by task.
fn by_task() -> String {
    let text = page("docs/running.md");
    let section = text.split_once(BY_TASK).expect("docs/running.md has commands by task").1;
    section.split("\n## ").next().unwrap().to_owned()
}

/// Returns the command lines in the shell blocks of a page that run the program, by paragraphs.
fn blocks(text: &str) -> Vec<Vec<String>> {
    let blocks = text
        .split("```sh\n")
        .skip(1)
        .flat_map(|block| block.split("```").next().unwrap().split("\n\n"));
    let runs_it = |line: &&str| line.contains("hpctrain ") || line.ends_with("/hpctrain");
    let lines = |block: &str| {
        block
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter(runs_it)
            .map(str::to_owned)
            .collect()
    };
    blocks.map(lines).collect()
}

/// Returns a command with settings that make it end in seconds.
fn shortened(command: &str) -> String {
    let parts: Vec<String> = command.split(" : ").map(shortened_part).collect();
    parts.join(" : ")
}

/// Shortens the command of one program of an MPMD job (`mpirun … : …`).
fn shortened_part(command: &str) -> String {
    // The short run has other steps than that of the page.
    let command = command.replace("step-00001500", "step-00000003");
    let command = command.replace("1600", "4").replace("1501", "4");
    let command = command.replace("--chaos 60", "--chaos 4");
    let more = match command.split_once("hpctrain").unwrap().1.trim_start() {
        rest if rest.contains("--preset gpt-baby") && rest.starts_with("train") => {
            format!("{RUN} --set run.steps=1 --set batch.global=2 --set eval.samples=2")
        }
        rest if rest.starts_with("simulate") => format!("{RUN} {SMALL}"),
        rest if rest.is_empty() || rest.starts_with("train") || rest.starts_with("--") => {
            let is_language = !rest.contains("--preset") || rest.contains("--preset gpt-char");
            format!("{RUN} {}", if is_language { NARROW } else { "" })
        }
        rest if rest.starts_with("verify --chaos") => {
            format!("--every 2 --set elastic.timeout=2 {SMALL}")
        }
        rest if rest.starts_with("verify") => format!("--steps 2 {SMALL}"),
        rest if rest.starts_with("bench kernels") => "--steps 1 --samples 2".into(),
        rest if rest.starts_with("bench step") || rest.starts_with("bench gemm") => {
            "--steps 1".into()
        }
        rest if rest.starts_with("bench comm") => "--batches 1".into(),
        rest if rest.starts_with("plan") && rest.contains("--measure") => SMALL.into(),
        rest if rest.starts_with("eval --checkpoint") => "--set eval.samples=8".into(),
        _ => String::new(),
    };
    format!("{command} {more}")
}

/// Creates a directory like a clone.
fn clone() -> TempDir {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let clone = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(clone.path().join("target/release")).unwrap();
    symlink(program(), clone.path().join("target/release/hpctrain")).unwrap();
    for name in ["README.md", "examples"] {
        symlink(root.join(name), clone.path().join(name)).unwrap();
    }
    clone
}

/// Runs a command in a clone, with the program on the path.
fn run(script: &str, clone: &TempDir) {
    let mut bash = Command::new("bash");
    // Commands get the environment of tests.
    bash.envs(mpirun(1).get_envs().filter_map(|(name, value)| Some((name, value?))));
    let path =
        format!("{}/target/release:{}", clone.path().display(), std::env::var("PATH").unwrap());
    let ended = finish(bash.env("PATH", path).args(["-c", script]).current_dir(clone.path()));
    assert!(ended.status.success(), "{script}\n{ended}");
}

#[test]
fn the_first_screen_has_the_commands_of_gpus_and_slurm() {
    let readme = page("README.md");
    let lines: Vec<&str> = readme.lines().collect();
    assert!(lines.len() <= 130, "README.md has {} lines", lines.len());
    assert!(lines[..25].join("\n").contains("rank per GPU"));
    assert!(
        lines[..45].iter().any(|line| line.starts_with("sbatch ") || line.starts_with("srun "))
    );
}

#[test]
fn standard_terms_are_found() {
    let pages = ["README.md", "docs/cluster.md", "docs/gpu.md"].map(page);
    let is_found = |line: &&str| line.starts_with('#') || line.starts_with('|');
    let found: Vec<&str> = pages.iter().flat_map(|page| page.lines()).filter(is_found).collect();
    let missing: Vec<_> =
        TERMS.iter().filter(|term| !found.iter().any(|line| line.contains(*term))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn commands_of_the_pages_work() {
    let all = blocks(&by_task()).concat();
    assert!(all.len() > 35, "{all:#?}");
    assert!(
        blocks(&page("README.md")).concat().iter().all(|command| all.contains(command)),
        "README.md has others"
    );
    let elsewhere = |command: &&String| ELSEWHERE.iter().any(|(part, _)| command.contains(part));
    assert_eq!(all.iter().filter(|command| elsewhere(command)).count(), ELSEWHERE.len());
    let clone = clone();
    all.iter()
        .filter(|command| !elsewhere(command))
        .for_each(|command| run(&shortened(command), &clone));
}

/// Runs the commands of a page from one heading to another. Those of a paragraph run one after the
/// other in a separate directory, because a run is never overwritten.
fn commands_of(page: &str, from: &str, to: &str) {
    let text = self::page(&format!("docs/{page}.md"));
    let at = |heading: &str| text.find(heading).unwrap_or_else(|| panic!("{page}.md: {heading}"));
    let end = if to.is_empty() { text.len() } else { at(to) };
    let all = blocks(&text[at(from)..end]);
    assert!(all.iter().any(|block| !block.is_empty()), "{page}.md has no commands");
    for block in all {
        let clone = clone();
        for command in block {
            // Fewer ranks are enough for the test.
            let command = match command.contains("parallel.tensor=2") {
                true => command,
                false => command.replace("-np 8", "-np 2").replace("-np 9", "-np 3"),
            };
            run(&shortened(&command), &clone);
        }
    }
}

#[test]
fn commands_of_cluster_work() {
    commands_of("cluster", "", "");
}

#[test]
fn commands_of_running_work() {
    commands_of("running", "", BY_TASK);
}

#[test]
fn commands_of_layouts_work() {
    commands_of("parallelism", "", PLANNER);
}

#[test]
fn commands_of_planning_work() {
    commands_of("parallelism", PLANNER, "");
}

#[test]
fn commands_of_parameter_servers_work() {
    commands_of("parameter-servers", "", "");
}

#[test]
fn the_page_of_keys_is_what_the_program_prints() {
    let page = std::fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md"),
    )
    .unwrap();
    let printed =
        finish(Command::new(program()).args(["config", "keys", "--markdown"])).succeeded().stdout;
    let differs = page.lines().zip(printed.lines()).find(|(on_page, printed)| on_page != printed);
    assert!(
        page == printed,
        "docs/configuration.md is not what hpctrain config keys --markdown prints: {differs:?}"
    );
}
