//! A process's part in the membership of its job.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::agreement::Agreement;
use super::messages::{Answer, NoAnswer, Request, ask, connect, ended};
use super::monitor::Monitor;
use super::prober::ANSWER_TIMEOUT;
use super::state::State;
use super::{Member, Membership, MembershipDirectory};
use crate::algorithms::Algorithm;
use crate::communicator::{Comm, start_tcp_mesh};
use crate::transport::tcp::{Acceptor, Credentials, Secret, TcpMesh, host_name};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::fault;
use hpctrain_base::spawn::spawn;
use hpctrain_device::Backend;

/// The longest time that the members of a membership take to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// The pause before a process that joins asks again.
const JOIN_PAUSE: Duration = Duration::from_millis(200);

/// The settings of a process's part in the membership.
#[derive(Clone)]
pub struct MembershipOptions {
    /// The secret of the job.
    pub credentials: Credentials,
    /// The address of this host at which the process listens.
    pub address: IpAddr,
    /// The time without an answer after which a rank is lost.
    pub timeout: Duration,
    /// The least number of ranks.
    pub min_ranks: usize,
    /// Whether processes may join.
    pub rejoin: bool,
    /// The program, its version and the vector instructions: the same for all ranks, so that the bits
    /// do not depend on them.
    pub platform: String,
    /// A digest of the configuration.
    pub config: u64,
}

/// A process's part in the membership of its job: answers others, monitors the next rank, agrees on
/// the next membership, and connects to its ranks.
pub struct ControlPlane {
    options: MembershipOptions,
    state: Arc<State>,
    me: Member,
    /// Listens for connections of the next membership's ranks.
    data: Option<TcpListener>,
    directory: Option<MembershipDirectory>,
    _acceptor: Acceptor,
    _monitor: Monitor,
}

fn listen(address: IpAddr) -> Result<(TcpListener, SocketAddr)> {
    let refused = |e| Error::comm(format!("cannot listen on {address}: {e}"));
    let listener = TcpListener::bind((address, 0)).map_err(refused)?;
    let at = listener.local_addr().map_err(refused)?;
    Ok((listener, at))
}

impl ControlPlane {
    /// Starts to answer other processes of the job.
    ///
    /// # Errors
    /// Returns an error if the process cannot listen, or the system refuses a thread.
    pub fn open(options: MembershipOptions) -> Result<Self> {
        let (listener, control) = listen(options.address)?;
        let (data, data_address) = listen(options.address)?;
        let bytes = Secret::random()?;
        let me = Member {
            id: bytes[..8].iter().map(|byte| format!("{byte:02x}")).collect(),
            host: host_name(),
            pid: std::process::id(),
            control,
            data: data_address,
            platform: options.platform.clone(),
            config: options.config,
        };
        let state = Arc::new(State::default());
        state.lock().me.clone_from(&me.id);
        state.lock().refuses_joins = !options.rejoin;
        let serving = state.clone();
        let acceptor =
            Acceptor::open(listener, options.credentials.clone(), move |_, connection| {
                let state = serving.clone();
                spawn("membership-answer", move || state.serve(connection)).map(drop)
            })?;
        let monitor = Monitor::start(state.clone(), options.credentials.clone(), options.timeout)?;
        Ok(Self {
            options,
            state,
            me,
            data: Some(data),
            directory: None,
            _acceptor: acceptor,
            _monitor: monitor,
        })
    }

    /// Enters the first membership of a job: the ranks of `comm`. It gets its number from
    /// [`ControlPlane::publish`]; a loss before that ends the job. Collective over the world of
    /// `comm`.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails.
    pub fn begin<B: Backend>(&mut self, comm: &Comm<B>) -> Result<()> {
        let mine = serde_json::to_vec(&self.me).map_err(|e| Error::internal(e.to_string()))?;
        let all = comm.world().gather_bytes(mine).wait()?;
        let members = all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes))
            .collect::<Result<Vec<Member>, _>>()
            .map_err(|e| Error::comm(format!("a rank sent a malformed member: {e}")))?;
        let mut known = self.state.lock();
        known.membership =
            Some(Membership { number: 0, members, lost: vec![], joined: vec![], time: 0.0 });
        Ok(())
    }

    /// Publishes the first membership in the directory of the run, from which losses are survived;
    /// later ones are published when they are agreed on. Collective over the world of `comm`.
    ///
    /// # Errors
    /// Returns an error, the same on all ranks, if the file cannot be written.
    pub fn publish<B: Backend>(&mut self, comm: &Comm<B>, run: &Path) -> Result<()> {
        let directory = MembershipDirectory::of_run(run);
        let number = self.state.lock().number();
        let world = comm.world();
        let published = if world.rank() == 0 && number == 0 {
            self.write_first(&directory)
        } else {
            Ok(number)
        };
        let published = world.all_ok(published)?;
        let number = world.broadcast_numbers(&[published])?.first().copied().unwrap_or(0);
        self.directory = Some(directory);
        let mut known = self.state.lock();
        if let Some(membership) = &mut known.membership {
            membership.number = number;
        }
        known.interrupter = Some(comm.interrupter());
        if known.has_changed {
            known.change();
        }
        Ok(())
    }

    /// Writes the first membership of the job and returns its number.
    fn write_first(&self, directory: &MembershipDirectory) -> Result<u64> {
        // Others are answered while the file is written.
        let Some(mut membership) = self.membership() else {
            return Err(Error::internal("no membership was entered"));
        };
        membership.number = directory.newest_number()? + 1;
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        membership.time = time.map_or(0.0, |time| time.as_secs_f64());
        let written = directory.create(&membership, &self.me.id)?;
        if written != membership {
            return Err(Error::input(format!(
                "another job has written membership {} of {}",
                membership.number,
                directory.path().display()
            ))
            .hint("end it, or choose another run.name"));
        }
        Ok(membership.number)
    }

    /// Returns true if losses are survived: the membership is published.
    pub fn is_published(&self) -> bool {
        self.directory.is_some() && self.state.lock().number() > 0
    }

    /// Returns the membership.
    pub fn membership(&self) -> Option<Membership> {
        self.state.lock().membership.clone()
    }

    /// Returns the rank of this process in the membership.
    pub fn rank(&self) -> Option<usize> {
        self.state.lock().rank()
    }

    /// Returns true if ranks are lost, or processes wait to join: the ranks are to agree on the next
    /// membership.
    pub fn has_changed(&self) -> bool {
        self.state.lock().has_changed
    }

    /// Returns true on rank 0 if a process waits to join.
    pub fn has_joiners(&self) -> bool {
        self.options.rejoin && !self.state.lock().joins.is_empty()
    }

    /// Returns the time since the first loss of the membership was noticed.
    pub fn since_notice(&self) -> Duration {
        self.state.lock().noticed.map_or(Duration::ZERO, |at| at.elapsed())
    }

    /// Agrees with the other ranks on the next membership, and enters it. All ranks of the
    /// membership call it, after a loss or for a planned change.
    ///
    /// # Errors
    /// Returns an error of kind `Interrupted` if the others go on without this process or too few
    /// ranks are left, or another one if a file cannot be written.
    pub fn agree(&mut self) -> Result<Membership> {
        let Some(directory) = self.directory.clone() else {
            return Err(Error::lost("a rank was lost before the directory of the run was known"));
        };
        self.listen()?;
        let agreement = Agreement {
            state: &self.state,
            credentials: &self.options.credentials,
            me: &self.me,
            directory: &directory,
            timeout: self.options.timeout,
            min_ranks: self.options.min_ranks,
        };
        agreement.agree()
    }

    /// Listens at a new address for the next membership.
    fn listen(&mut self) -> Result<()> {
        if self.data.is_none() {
            let (listener, address) = listen(self.options.address)?;
            self.data = Some(listener);
            self.me.data = address;
        }
        Ok(())
    }

    /// Asks to become a rank of the job that trains the run in directory `run`, and waits until it
    /// is, or until `is_over` returns true since there is nothing to join any more. Returns the
    /// membership that it has joined.
    ///
    /// # Errors
    /// Returns an error if this process differs from the ranks in what decides the bits.
    pub fn join(&mut self, run: &Path, is_over: impl Fn() -> bool) -> Result<Option<Membership>> {
        let directory = MembershipDirectory::of_run(run);
        self.directory = Some(directory.clone());
        loop {
            if is_over() {
                return Ok(None);
            }
            if let Some(membership) = directory.newest()? {
                if membership.rank(&self.me.id).is_some() {
                    // The rank that was asked has decided so, and was lost before its answer.
                    self.state.lock().enter(membership.clone());
                    return Ok(Some(membership));
                }
                self.check_platform(&membership)?;
                if let Some(joined) = self.ask_to_join(&membership)? {
                    self.state.lock().enter(joined.clone());
                    return Ok(Some(joined));
                }
            }
            std::thread::sleep(JOIN_PAUSE);
        }
    }

    /// Refuses to join ranks whose bits would differ.
    fn check_platform(&self, membership: &Membership) -> Result<()> {
        if membership.members.iter().any(|other| other.config != self.me.config) {
            return Err(Error::input("this process cannot join: its configuration is another one")
                .hint("start it with the configuration of the job"));
        }
        let other = membership.members.iter().find(|other| other.platform != self.me.platform);
        let Some(other) = other else { return Ok(()) };
        Err(Error::input(format!(
            "this process cannot join: it is {}, the rank on {} is {}",
            self.me.platform, other.host, other.platform
        ))
        .hint("join with the same program on the same type of CPU or GPU: others give other bits"))
    }

    /// Asks the first member to join; returns the membership once this process is in it, or `None`
    /// to ask again.
    fn ask_to_join(&mut self, membership: &Membership) -> Result<Option<Membership>> {
        self.listen()?;
        let Some(first) = membership.members.first() else { return Ok(None) };
        let credentials = &self.options.credentials;
        let Ok(mut connection) = connect(first, credentials, ANSWER_TIMEOUT) else {
            return Ok(None);
        };
        fault::point("join");
        // It answers at the end of a step.
        let request = Request::Join(self.me.clone());
        match ask(&mut connection, &request, Duration::from_secs(600)) {
            Ok(Answer::Membership(joined)) if joined.rank(&self.me.id).is_some() => {
                Ok(Some(joined))
            }
            Ok(Answer::End { message, interrupted }) => Err(ended(message, interrupted)),
            Ok(_) | Err(NoAnswer::Gone(_) | NoAnswer::Silent(_)) => Ok(None),
        }
    }

    /// Takes over the order of the ranks of `comm`, which has the members of the membership.
    /// Collective over its world.
    ///
    /// # Errors
    /// Returns an error if a message between ranks fails, or a rank is not a member.
    pub fn order_by<B: Backend>(&mut self, comm: &Comm<B>) -> Result<()> {
        let ids = comm.world().gather_bytes(self.me.id.clone().into_bytes()).wait()?;
        let mut known = self.state.lock();
        let Some(membership) = &mut known.membership else { return Ok(()) };
        let place = |member: &Member| ids.iter().position(|id| id == member.id.as_bytes());
        if ids.len() != membership.members.len()
            || membership.members.iter().any(|one| place(one).is_none())
        {
            return Err(Error::lost("the ranks that MPI has left are not the members"));
        }
        membership.members.sort_by_key(place);
        Ok(())
    }

    /// Connects to the ranks of the membership.
    ///
    /// # Errors
    /// Returns an error of kind `Lost` if a rank is gone: then agree again.
    pub fn connect<B: Backend>(&mut self, algorithm: Algorithm) -> Result<Comm<B>> {
        fault::point("connect");
        let membership =
            self.membership().ok_or_else(|| Error::internal("no membership was entered"))?;
        let rank = membership
            .rank(&self.me.id)
            .ok_or_else(|| Error::internal("not a member of the membership"))?;
        let listener =
            self.data.take().ok_or_else(|| Error::internal("no listener for connections"))?;
        let peers = membership.members.iter().map(|member| (member.data, member.host.clone()));
        let state = self.state.clone();
        let credentials = self.options.credentials.clone();
        let members = membership.members.clone();
        let is_gone = move |rank: usize| {
            let member = &members[rank];
            let known = state.lock();
            let is_known = known.has_changed || known.lost.contains_key(&member.id);
            drop(known);
            is_known
                || matches!(connect(member, &credentials, ANSWER_TIMEOUT), Err(NoAnswer::Gone(_)))
        };
        let mesh = TcpMesh {
            rank,
            peers: peers.collect(),
            listener,
            // The messages of ranks are authenticated, but not encrypted.
            credentials: Credentials { encrypt: false, ..self.options.credentials.clone() },
            until: Instant::now() + CONNECT_TIMEOUT,
            is_gone: Box::new(is_gone),
        };
        let connected = start_tcp_mesh(mesh, algorithm);
        let mut known = self.state.lock();
        match &connected {
            Ok(comm) => known.interrupter = Some(comm.interrupter()),
            Err(e) if e.kind() == Kind::Lost => known.has_changed = true,
            Err(_) => {}
        }
        if known.has_changed && connected.is_ok() {
            known.change();
        }
        connected
    }
}
