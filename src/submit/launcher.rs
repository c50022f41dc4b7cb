//! Launchers of ranks, and the MPI libraries that they start them for.

use serde::Deserialize;

use super::batch_system::BatchSystem;

/// An MPI library, which decides how ranks find one another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum MpiLibrary {
    /// Open MPI, by PMIx.
    #[default]
    OpenMpi,
    /// MPICH and its derivatives, by PMI-2.
    Mpich,
    /// Intel MPI, by PMI-2.
    IntelMpi,
}

/// A launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) enum Launcher {
    /// Slurm's.
    #[serde(rename = "srun")]
    Srun,
    /// The MPI library's.
    #[serde(rename = "mpirun")]
    Mpirun,
    /// Flux's.
    #[serde(rename = "flux run")]
    FluxRun,
}

impl Launcher {
    /// Returns its name in a site file.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Srun => "srun",
            Self::Mpirun => "mpirun",
            Self::FluxRun => "flux run",
        }
    }

    /// Returns the launcher of a batch system without one in the site file.
    pub(super) fn usual(system: BatchSystem) -> Self {
        match system {
            BatchSystem::Slurm => Self::Srun,
            BatchSystem::Pbs => Self::Mpirun,
            BatchSystem::Flux => Self::FluxRun,
        }
    }
}
