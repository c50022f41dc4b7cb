//! The command that starts the ranks of a job on its nodes.

use super::batch_system::BatchSystem;
use super::job::BatchJob;
use super::launcher::{Launcher, MpiLibrary};
use super::site::SiteFile;
use crate::error::Result;

/// Returns the launcher of the site file, else that of the batch system.
///
/// # Errors
/// Returns an error if the batch system does not have it.
pub(super) fn launcher_of(site: &SiteFile, system: BatchSystem) -> Result<Launcher> {
    let usual = Launcher::usual(system);
    match site.launcher {
        None => Ok(usual),
        Some(given) if given == usual || given == Launcher::Mpirun => Ok(given),
        Some(given) => Err(site
            .refuse("launcher", given.name(), system)
            .hint(format!("launcher = {:?}, or omit the key", usual.name()))),
    }
}

/// Returns the words of the command before that of a rank.
pub(super) fn launch_command(launcher: Launcher, job: &BatchJob, mpi: MpiLibrary) -> Vec<String> {
    let BatchJob { nodes, ranks_per_node, cores_per_rank, .. } = *job;
    let ranks = nodes * ranks_per_node;
    match launcher {
        Launcher::Srun => srun(job, mpi),
        Launcher::Mpirun if mpi == MpiLibrary::OpenMpi => {
            let cores = cores_per_rank.map_or(String::new(), |cores| format!(":PE={cores}"));
            let mut words = vec!["mpirun".to_owned(), "--map-by".into()];
            words.push(format!("ppr:{ranks_per_node}:node{cores}"));
            words.extend(cores_per_rank.iter().flat_map(|_| ["--bind-to", "core"]).map(Into::into));
            words
        }
        Launcher::Mpirun => {
            let mut words = vec!["mpirun".to_owned(), "-n".into(), ranks.to_string()];
            words.extend(["-ppn".into(), ranks_per_node.to_string()]);
            // Intel MPI divides the cores of a node among its ranks by itself.
            if let (MpiLibrary::Mpich, Some(cores)) = (mpi, cores_per_rank) {
                words.extend(["-bind-to".into(), format!("core:{cores}")]);
            }
            words
        }
        Launcher::FluxRun => {
            let mut words = vec!["flux".to_owned(), "run".into()];
            words.extend([format!("-N{nodes}"), format!("-n{ranks}")]);
            words.extend(cores_per_rank.map(|cores| format!("-c{cores}")));
            words.extend(job.has_gpus().then(|| "-g1".into()));
            words.extend(["-o", "cpu-affinity=per-task"].map(Into::into));
            if job.has_gpus() {
                words.extend(["-o", "gpu-affinity=on"].map(Into::into));
            }
            if mpi == MpiLibrary::OpenMpi {
                words.extend(["-o", "pmi=pmix"].map(Into::into));
            }
            words
        }
    }
}

fn srun(job: &BatchJob, mpi: MpiLibrary) -> Vec<String> {
    let interface = if mpi == MpiLibrary::OpenMpi { "pmix" } else { "pmi2" };
    let mut words = vec!["srun".to_owned(), format!("--mpi={interface}")];
    words.extend(job.cores_per_rank.map(|cores| format!("--cpus-per-task={cores}")));
    words.push("--cpu-bind=cores".into());
    // Each socket gets as many ranks as it has GPUs.
    words.extend(job.has_gpus().then(|| "--distribution=block:cyclic".into()));
    words.push("--kill-on-bad-exit=1".into());
    words
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::small_job;
    use super::*;

    /// Returns the command of a launcher for two nodes of two ranks with four cores each.
    fn command(launcher: Launcher, mpi: MpiLibrary) -> String {
        launch_command(launcher, &small_job(), mpi).join(" ")
    }

    #[test]
    fn each_mpi_library_has_its_options() {
        use {Launcher::*, MpiLibrary::*};
        for (launcher, mpi, words) in [
            (
                Srun,
                Mpich,
                "srun --mpi=pmi2 --cpus-per-task=4 --cpu-bind=cores --kill-on-bad-exit=1",
            ),
            (Mpirun, OpenMpi, "mpirun --map-by ppr:2:node:PE=4 --bind-to core"),
            (Mpirun, Mpich, "mpirun -n 4 -ppn 2 -bind-to core:4"),
            (Mpirun, IntelMpi, "mpirun -n 4 -ppn 2"),
            (FluxRun, Mpich, "flux run -N2 -n4 -c4 -o cpu-affinity=per-task"),
            (FluxRun, OpenMpi, "flux run -N2 -n4 -c4 -o cpu-affinity=per-task -o pmi=pmix"),
        ] {
            assert_eq!(command(launcher, mpi), words);
        }
    }

    #[test]
    fn a_launcher_of_another_batch_system_is_refused() {
        let site = |text: &str| SiteFile::parse(text, "/s.toml".into()).unwrap();
        let of = |text: &str, system| launcher_of(&site(text), system);
        assert_eq!(of("", BatchSystem::Pbs), Ok(Launcher::Mpirun));
        assert_eq!(of("launcher = 'mpirun'", BatchSystem::Slurm), Ok(Launcher::Mpirun));
        let error = of("launcher = 'srun'", BatchSystem::Flux).unwrap_err();
        assert_eq!(
            error.to_string(),
            "/s.toml: launcher = \"srun\" is not supported for Flux\n\
             hint: launcher = \"flux run\", or omit the key"
        );
    }
}
