//! A rank of an elastic job: trains, and after each change of the ranks trains on with those that
//! are there.
//!
//! After a loss the whole run is built anew in the same process, by the code that resumes runs: the
//! ranks agree on who is left (`comm/membership`), connect, and `--resume auto` continues from the
//! newest in-memory checkpoint. Nothing of the old communicator, plan or model is patched.

mod rendezvous;

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Signal, set_parent_process_death_signal};

use crate::comm::interface::host_address;
use crate::comm::membership::{ControlPlane, MembershipOptions};
use crate::comm::{
    ADDRESS_VARIABLE, Algorithm, Comm, Credentials, Launch, Secret, TcpRendezvous, mpi,
    start_mpi_within, start_tcp,
};
use crate::config::{Config, check_elastic, check_ranks};
use crate::error::{Error, Kind, Result};
use crate::gpu_assignment::platform;
use crate::job::{self, NO_RANKS, fail};
use crate::run_dir::markers::{Markers, RunStatus};
use crate::run_dir::{RestoreScope, Resume};
use crate::telemetry::logging;
use crate::train::{
    Customization, ElasticJob, TrainRequest, check_same_config, config_digest, train,
};
use hpctrain_cpu::Cpu;

use rendezvous::remove_rendezvous;
pub use rendezvous::{LaunchedRank, await_rendezvous, launched_rank, rendezvous_directory};

/// The longest time that a process which joins waits for ranks that answer.
const JOIN_TIMEOUT: Duration = Duration::from_secs(60);

/// The number of memberships one after the other whose ranks may fail to connect.
const CONNECT_ATTEMPTS: usize = 8;

/// Runs a rank of an elastic job and returns its exit code.
pub fn run(launch: Option<&Launch>, request: TrainRequest) -> i32 {
    // Ranks end with the program that has started them, if the system supports it.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let opened = Start::find(launch, &request.config).and_then(|start| {
        let job = open(start.rendezvous.clone(), start.address, &request.config)?;
        Ok((start, job))
    });
    let (start, job) = match opened {
        Ok(opened) => opened,
        Err(e) => return fail(&e),
    };
    let over_mpi = matches!(start.meeting, Meeting::Mpi);
    let rank = Rank { job: job.clone(), request, over_mpi };
    let ended = rank.run(&start.meeting);
    if ended == Ok(0) && job.rank() == Some(0) {
        remove_rendezvous(&start.rendezvous);
    }
    ended.unwrap_or_else(|e| {
        // Ranks that share an error print it once.
        if e.is_shared() && job.rank() != Some(0) { e.exit_code() } else { fail(&e) }
    })
}

/// How this process finds the others.
struct Start {
    /// The directory in which the processes of the job find each other.
    rendezvous: PathBuf,
    /// The address at which this process listens.
    address: IpAddr,
    /// How the ranks meet first.
    meeting: Meeting,
}

/// How the ranks of a job meet first.
enum Meeting {
    /// They connect over TCP.
    Tcp(TcpRendezvous),
    /// They are ranks of MPI, which goes on without those that are lost.
    Mpi,
    /// This process joins them.
    Join,
}

impl Start {
    /// Finds how this process was started: by `--spawn`, by an agent, or as a rank of mpirun or
    /// srun, which need not support losses themselves as long as they let the other ranks run.
    fn find(launch: Option<&Launch>, config: &Config) -> Result<Self> {
        let interface = config.comm.interface.as_deref();
        if let Some((launch, rendezvous)) = launch.and_then(|one| Some((one, one.rendezvous()?))) {
            let address = match std::env::var_os(ADDRESS_VARIABLE) {
                Some(_) => host_address(interface)?,
                None => Ipv4Addr::LOCALHOST.into(),
            };
            let meeting = match launch.meeting.clone() {
                Some(meeting) => Meeting::Tcp(TcpRendezvous { address, ..meeting }),
                None => Meeting::Join,
            };
            return Ok(Self { rendezvous: rendezvous.into(), address, meeting });
        }
        let Some(LaunchedRank { rank, ranks, job }) =
            launched_rank(|name| std::env::var(name).ok())
        else {
            return Err(Error::input("elastic.on = true, but this process has no other ranks")
                .hint("hpctrain --spawn N, hpctrain supervise --elastic --hosts …, or mpirun --enable-recovery"));
        };
        let root = config.run.root.as_ref();
        let dir = match rank {
            0 => rendezvous_directory(root, &job)?,
            _ => await_rendezvous(root, &job)?,
        };
        let address = host_address(interface)?;
        let meeting = match mpi::has_ulfm() {
            true => Meeting::Mpi,
            false => Meeting::Tcp(TcpRendezvous { dir: dir.clone(), rank, ranks, address }),
        };
        Ok(Self { rendezvous: dir, address, meeting })
    }
}

/// Opens the control plane of this process.
fn open(rendezvous: PathBuf, address: IpAddr, config: &Config) -> Result<ElasticJob> {
    let credentials =
        Credentials { secret: Secret::read(&rendezvous)?, encrypt: config.comm.encrypt };
    let plane = ControlPlane::open(MembershipOptions {
        credentials,
        address,
        timeout: Duration::from_secs(config.elastic.timeout),
        min_ranks: config.elastic.min_ranks,
        rejoin: config.elastic.rejoin,
        platform: format!("hpctrain {} on {}", env!("CARGO_PKG_VERSION"), platform(config)),
        config: config_digest(config)?,
    })?;
    Ok(ElasticJob::new(plane, rendezvous))
}

/// A rank of an elastic job.
struct Rank {
    job: ElasticJob,
    request: TrainRequest,
    /// Whether the ranks communicate over MPI.
    over_mpi: bool,
}

impl Rank {
    /// Trains until the run ends, and returns the exit code.
    fn run(mut self, meeting: &Meeting) -> Result<i32> {
        self.request.elastic = Some(self.job.clone());
        let timeout = self.request.config.comm.unmeasured_timeout();
        let algorithm = Algorithm::HalvingDoubling;
        let mut comm = match meeting {
            Meeting::Tcp(meeting) => start_tcp(meeting, algorithm)?,
            Meeting::Mpi => start_mpi_within(algorithm, timeout)?,
            Meeting::Join => match self.join()? {
                Some(comm) => comm,
                None => return Ok(self.unneeded()),
            },
        };
        if !matches!(meeting, Meeting::Join) {
            self.job.begin(&comm)?;
        }
        loop {
            job::abort_on_panic(&comm);
            logging::rename_console(&format!("rank {}", comm.rank()));
            if !timeout.is_zero() {
                comm.set_watchdog_timeout(timeout)?;
            }
            let error = match self.train(&comm) {
                Ok(code) => {
                    comm.shutdown();
                    return Ok(code);
                }
                Err(e) => e,
            };
            let has_changed = comm.has_lost_ranks() || error.kind() == Kind::Lost;
            if !has_changed || !self.job.is_published() {
                return Ok(job::end_failed(&comm, error, true));
            }
            log::info!("the ranks change: {}", error.message());
            comm = self.regroup(Some(comm))?;
        }
    }

    /// Returns the exit code of a process that has found no ranks to join.
    fn unneeded(&self) -> i32 {
        let has_finished = self.job.run().is_some_and(|run| has_finished(&run));
        if has_finished { 0 } else { NO_RANKS }
    }

    /// Trains with the ranks of `comm` and returns the exit code.
    fn train(&self, comm: &Comm<Cpu>) -> Result<i32> {
        let world = comm.world();
        let config = &self.request.config;
        check_same_config(&world, config)?;
        if !self.job.is_regrouping() {
            world.all_ok(check_numbers_of_ranks(config, comm.size()))?;
        }
        train(comm, &self.request, Customization::default(), None).map(|ended| ended.exit_code())
    }

    /// Joins a job that trains, and connects to its ranks; returns `None` if no rank answers.
    fn join(&mut self) -> Result<Option<Comm<Cpu>>> {
        let run = self.job.published_run()?;
        let began = Instant::now();
        let is_over = || has_finished(&run) || began.elapsed() > JOIN_TIMEOUT;
        if !self.job.join(&run, is_over)? {
            log::warn!("no rank of the job that trains {} answers", run.display());
            return Ok(None);
        }
        self.continue_run();
        match self.job.connect() {
            Ok(comm) => Ok(Some(comm)),
            Err(e) if e.kind() == Kind::Lost => self.regroup(None).map(Some),
            Err(e) => Err(e),
        }
    }

    /// Agrees with the other ranks on who is left, and connects to them. `before` is the communicator
    /// in which a rank was lost.
    fn regroup(&mut self, before: Option<Comm<Cpu>>) -> Result<Comm<Cpu>> {
        self.continue_run();
        let over_mpi = match before {
            Some(before) if self.over_mpi => Some(before),
            Some(before) => {
                before.shutdown();
                None
            }
            None => None,
        };
        for _ in 0..CONNECT_ATTEMPTS {
            self.job.regroup()?;
            let connected = match &over_mpi {
                Some(before) => self.job.shrink(before),
                None => self.job.connect(),
            };
            match connected {
                Err(e) if e.kind() == Kind::Lost => log::warn!("{}", e.message()),
                connected => return connected,
            }
        }
        Err(Error::interrupted(format!(
            "ranks that are left could not connect to each other {CONNECT_ATTEMPTS} times"
        ))
        .hint("see whether all hosts reach each other over comm.interface"))
    }

    /// Makes the next start of the run continue it.
    fn continue_run(&mut self) {
        let run = self.job.run();
        let name = run.as_deref().and_then(|run| run.file_name());
        if let Some(name) = name.and_then(|name| name.to_str()) {
            self.request.config.run.name = Some(name.to_owned());
        }
        self.request.resume = Resume::Auto;
        // The run restores what it has begun with, or continues all of its own state.
        self.request.take = RestoreScope::Everything;
    }
}

/// Returns true if the run in a directory has finished.
fn has_finished(run: &Path) -> bool {
    Markers::new(run).ended().is_some_and(|end| end.status == RunStatus::Finished)
}

/// Checks that a run on `ranks` ranks can continue on fewer.
///
/// # Errors
/// Returns an error for the first number of ranks that does not fit, with the key.
pub fn check_numbers_of_ranks(config: &Config, ranks: usize) -> Result<()> {
    // It names the key that excludes elastic training.
    check_elastic(config)?;
    let least = config.elastic.min_ranks;
    if ranks < least {
        return Err(Error::input(format!("{ranks} ranks, fewer than elastic.min_ranks = {least}"))
            .hint("start more ranks, or set elastic.min_ranks lower"));
    }
    (least..=ranks).try_for_each(|fewer| {
        check_ranks(config, fewer).map_err(|e| {
            e.at(format!("elastic.on = true, and {fewer} ranks may be left of {ranks}"))
        })
    })
}
