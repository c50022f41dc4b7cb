//! Writes a job script: the checks of `hpctrain doctor`, then training, then the requeue.

use super::batch_system::BatchSystem;
use super::dialect::Dialect;
use super::job::BatchJob;
use super::launch_command::{launch_command, launcher_of};
use super::launcher::{Launcher, MpiLibrary};
use super::quote::{quote, quote_all};
use super::site::SiteFile;
use super::{flux, pbs, slurm};
use crate::error::Result;

/// The commands after the settings: the same for all batch systems.
const STEPS: &str = r#"# A job that is always interrupted for the same reason is not requeued for ever.
may_retry() { [ "$restarts" -lt 5 ]; }

# All ranks check their nodes, started as those that train.
code=0
findings=$("${launch[@]}" "$hpctrain" doctor "${doctor[@]}") || code=$?
printf '%s\n' "$findings"
if [ "$code" -eq 75 ]; then
    # A signal came: the job was preempted before it trained.
    ! may_retry || requeue
    exit "$code"
elif [ "$code" -ne 0 ]; then
    grep -A 1 '^✗' <<<"$findings" >&2 || true
    echo "preflight failed: hpctrain doctor ended with code $code on $nodes; nothing was trained" >&2
    exit "$code"
fi

# --resume auto starts the run if it has no checkpoint. After a crash supervise starts the ranks again in this job.
code=0
"$hpctrain" supervise --requeue -- "${start[@]}" "$hpctrain" train "${train[@]}" || code=$?
# 75: saved, to be continued. 74: the file system failed for too long.
if [ "$code" -eq 75 ] || { [ "$code" -eq 74 ] && may_retry; }; then
    requeue
fi
exit "$code"
"#;

/// Makes Open MPI pass these variables to all nodes; other launchers pass all variables. Supervise
/// adds one to the list, so it cannot be mixed with the option `-x`.
const PASSED: &str = r#"export LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}
# Open MPI's mpirun passes only these variables to the other nodes.
list=${OMPI_MCA_mca_base_env_list:-}
export OMPI_MCA_mca_base_env_list="${list:+$list;}PATH;LD_LIBRARY_PATH;HDF5_USE_FILE_LOCKING""#;

/// Starts the ranks with the time that is left, which after a restart is less.
const START_IN_TIME: &str = r#"start=(bash -c 'left=$((deadline - $(date +%s))); exec "$@" --set run.time_limit="$((left > 0 ? left : 1))s"' start "${launch[@]}")"#;

/// Writes the script. `plan` describes the layout and the memory of a rank.
///
/// # Errors
/// Returns an error if the batch system does not have what the site file names, or if a value has
/// control characters.
pub(super) fn script(
    system: BatchSystem,
    job: &BatchJob,
    site: &SiteFile,
    plan: &str,
) -> Result<String> {
    let launcher = launcher_of(site, system)?;
    let dialect = match system {
        BatchSystem::Slurm => slurm::dialect(job, site, launcher),
        BatchSystem::Pbs => pbs::dialect(job, site)?,
        BatchSystem::Flux => flux::dialect(job, site)?,
    };
    let sections = [
        head(job, site, plan, &dialect),
        environment(job, site, launcher, &dialect)?,
        settings(job, &launch_command(launcher, job, site.mpi), &dialect)?,
        format!("requeue() {{\n{}\n}}\n{STEPS}", dialect.requeue),
    ];
    Ok(sections.join("\n"))
}

/// Returns the comments and the directives at the top.
fn head(job: &BatchJob, site: &SiteFile, plan: &str, dialect: &Dialect) -> String {
    let plural =
        |count: usize, one: &str| format!("{count} {one}{}", if count == 1 { "" } else { "s" });
    let devices = if job.has_gpus() { ", one GPU each" } else { "" };
    let mut lines = vec![
        "#!/usr/bin/env bash".to_owned(),
        format!(
            "# Written by hpctrain submit: {} × {}{devices}.",
            plural(job.nodes, "node"),
            plural(job.ranks_per_node, "rank")
        ),
        format!("# {plan}"),
        String::new(),
    ];
    let directives = dialect.directives.iter().chain(&site.extra);
    lines.extend(directives.map(|directive| format!("{} {directive}", dialect.prefix)));
    lines.push(String::new());
    lines.join("\n")
}

/// Returns the directory, the modules and the variables.
fn environment(
    job: &BatchJob,
    site: &SiteFile,
    launcher: Launcher,
    dialect: &Dialect,
) -> Result<String> {
    let mut lines = vec!["set -euo pipefail".to_owned()];
    lines.extend(dialect.setup.map(Into::into));
    lines.push(format!("cd {}", quote(&job.directory)?));
    if !(site.modules.is_empty() && site.setup.is_empty()) {
        lines.push("# Scripts of environment modules read variables that are not set.".into());
        lines.push("set +u".into());
        if !site.modules.is_empty() {
            lines.push(format!(
                "module load {}",
                quote_all(site.modules.iter().map(String::as_str))?
            ));
        }
        lines.extend(site.setup.iter().cloned());
        lines.push("set -u".into());
    }
    lines.push(
        "# Lustre and NFS without a lock service refuse HDF5's locks, which protect nothing here."
            .into(),
    );
    lines.push("export HDF5_USE_FILE_LOCKING=FALSE".into());
    if launcher == Launcher::Mpirun && site.mpi == MpiLibrary::OpenMpi {
        lines.push(PASSED.into());
    }
    Ok(lines.join("\n") + "\n")
}

/// Returns the variables that the steps use.
fn settings(job: &BatchJob, launch: &[String], dialect: &Dialect) -> Result<String> {
    let mut lines = vec![format!("hpctrain={}", quote(&job.program)?)];
    match &job.run_name {
        Some(name) => lines.push(format!("run_name={}", quote(name)?)),
        None => {
            lines.push("# The name stays the same after a requeue.".into());
            lines.push(format!("run_name=${{RUN_NAME:-{}-{}}}", job.name, dialect.job_id));
        }
    }
    lines.push(format!("restarts={}", dialect.restarts));
    lines.push(format!("nodes={}", dialect.nodes));
    lines.push(format!("launch=({})", quote_all(launch.iter().map(String::as_str))?));
    let root = quote(&job.run_root)?;
    let gpus = if job.has_gpus() { "--require-gpus " } else { "" };
    lines.push(format!("doctor=({gpus}--run-root {root})"));
    let arguments = quote_all(job.arguments.iter().map(String::as_str))?;
    let space = if arguments.is_empty() { "" } else { " " };
    lines.push(format!(r#"train=({arguments}{space}--set run.name="$run_name" --resume auto)"#));
    match (job.seconds, job.lead()) {
        (Some(seconds), Some(lead)) if !dialect.has_signal && !job.has_run_limit => {
            lines.push(format!("# The run saves and ends {lead} seconds before the time limit."));
            lines.push(format!("export deadline=$(($(date +%s) + {}))", seconds - lead));
            lines.push(START_IN_TIME.into());
        }
        _ => lines.push(r#"start=("${launch[@]}")"#.into()),
    }
    Ok(lines.join("\n") + "\n")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::job::tests::small_job;
    use super::*;

    const PLAN: &str = "pipeline 1 × replica 4 × shard 1 × tensor 1, ZeRO 0, micro-batches of 8; a rank needs 90 MiB of memory";

    const SITE: &str = "partition = 'gpu'\naccount = 'proj-1'\nmodules = ['gcc/13', 'openmpi']\n\
                        setup = ['export NCCL_DEBUG=INFO']\n";

    fn site(text: &str) -> SiteFile {
        SiteFile::parse(text, "/s.toml".into()).unwrap()
    }

    /// Fails if bash, and shellcheck where there is one, finds a fault.
    #[track_caller]
    fn check_syntax(script: &str) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("script");
        std::fs::write(&path, script).unwrap();
        let run = |program: &str, arguments: &[&str]| {
            std::process::Command::new(program).args(arguments).arg(&path).output()
        };
        let ended = run("bash", &["-n"]).unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        if let Ok(ended) = run("shellcheck", &["--severity=warning"]) {
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
        }
    }

    /// Compares a script with a file of `golden/`, or writes it there with `UPDATE=1`.
    #[track_caller]
    fn check_golden(file: &str, system: BatchSystem, job: &BatchJob, site: &SiteFile) {
        let script = script(system, job, site, PLAN).unwrap();
        check_syntax(&script);
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/submit/golden").join(file);
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&path, &script).unwrap();
        }
        let golden = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(script == golden, "{file}; write it: UPDATE=1 cargo test --lib submit::\n{script}");
    }

    #[test]
    fn scripts_are_those_of_the_files() {
        let gpus = BatchJob { gpus_per_node: 2, ..small_job() };
        let more =
            site(&format!("{SITE}qos = 'high'\nextra = ['--constraint=a100', '--exclusive']"));
        check_golden("slurm.sbatch", BatchSystem::Slurm, &gpus, &more);
        check_golden("pbs.sh", BatchSystem::Pbs, &gpus, &site(SITE));
        check_golden("flux.sh", BatchSystem::Flux, &gpus, &site(SITE));
        let least = BatchJob {
            nodes: 1,
            ranks_per_node: 1,
            cores_per_rank: None,
            seconds: None,
            run_name: Some("it's mine".into()),
            arguments: vec![],
            ..small_job()
        };
        check_golden("least.sbatch", BatchSystem::Slurm, &least, &SiteFile::default());
    }

    #[test]
    fn every_combination_is_valid_for_bash() {
        for system in [BatchSystem::Slurm, BatchSystem::Pbs, BatchSystem::Flux] {
            for mpi in ["open-mpi", "mpich", "intel-mpi"] {
                for more in ["", "launcher = 'mpirun'"] {
                    let site = site(&format!("mpi = '{mpi}'\n{more}"));
                    check_syntax(&script(system, &small_job(), &site, PLAN).unwrap());
                }
            }
        }
    }

    #[test]
    fn a_run_ends_before_the_time_limit_by_signal_or_by_key() {
        let text =
            |system, more: &str, job: &BatchJob| script(system, job, &site(more), PLAN).unwrap();
        let (by_signal, by_key) = ("--signal=USR1@120", "+ 14280))");
        let slurm = text(BatchSystem::Slurm, "", &small_job());
        assert!(slurm.contains(by_signal) && !slurm.contains(by_key), "{slurm}");
        let mpirun = text(BatchSystem::Slurm, "launcher = 'mpirun'", &small_job());
        assert!(!mpirun.contains(by_signal) && mpirun.contains(by_key), "{mpirun}");
        let limited = BatchJob { has_run_limit: true, ..small_job() };
        let pbs = text(BatchSystem::Pbs, "", &limited);
        assert!(!pbs.contains("deadline"), "{pbs}");
    }

    #[test]
    fn a_qos_is_slurms() {
        for system in [BatchSystem::Pbs, BatchSystem::Flux] {
            let error = script(system, &small_job(), &site("qos = 'high'"), PLAN).unwrap_err();
            let words = format!("/s.toml: qos = \"high\" is not supported for {system}\nhint: ");
            assert!(error.to_string().contains(&words), "{error}");
        }
    }

    #[test]
    fn words_cannot_leave_their_line() {
        let job =
            BatchJob { arguments: vec!["--set".into(), "a=1\nrm -rf x".into()], ..small_job() };
        let error = script(BatchSystem::Slurm, &job, &SiteFile::default(), PLAN).unwrap_err();
        assert!(error.to_string().contains("control character"), "{error}");
    }
}
