//! The parts of a job script that are Slurm's.

use super::dialect::Dialect;
use super::job::BatchJob;
use super::launcher::Launcher;
use super::site::SiteFile;

/// Returns Slurm's parts of a job script.
pub(super) fn dialect(job: &BatchJob, site: &SiteFile, launcher: Launcher) -> Dialect {
    let mut directives = vec![
        format!("--job-name={}", job.name),
        format!("--nodes={}", job.nodes),
        format!("--ntasks-per-node={}", job.ranks_per_node),
    ];
    // With --gpus-per-task each rank would see its own GPU only, and NCCL would not use NVLink.
    directives.extend(job.has_gpus().then(|| format!("--gpus-per-node={}", job.gpus_per_node)));
    directives.extend(job.cores_per_rank.map(|cores| format!("--cpus-per-task={cores}")));
    directives.extend(job.clock().map(|clock| format!("--time={clock}")));
    let names = [("partition", &site.partition), ("account", &site.account), ("qos", &site.qos)];
    directives.extend(
        names.into_iter().filter_map(|(option, value)| {
            value.as_ref().map(|value| format!("--{option}={value}"))
        }),
    );
    directives.push("--requeue".into());
    // Slurm sends the signal to the tasks of srun. Those of mpirun are its daemons.
    let has_signal = launcher == Launcher::Srun;
    let lead = job.lead().filter(|_| has_signal);
    directives.extend(lead.map(|lead| format!("--signal=USR1@{lead}")));
    directives.extend(["--open-mode=append", "--output=%x-%j.log"].map(Into::into));
    Dialect {
        prefix: "#SBATCH",
        directives,
        has_signal,
        job_id: "$SLURM_JOB_ID",
        restarts: "${SLURM_RESTART_COUNT:-0}",
        nodes: "$SLURM_JOB_NODELIST",
        setup: None,
        requeue: r#"    scontrol requeue "$SLURM_JOB_ID""#,
    }
}
