//! A connection to parameters on servers, by which custom functions pull values and push gradients.

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::partitioner::ParamRange;
use super::protocol::{CoordinatorRequest, CoordinatorResponse, Pushed, Values};
use super::push_pull::{PullTarget, PushSource, ServerConnections};
use super::rendezvous::PsRendezvous;
use super::rpc_client::RpcClient;
use super::run_spec::{RunSpec, layouts};
use hpctrain_base::error::{Error, Kind, Result};
use hpctrain_base::layout::{Tensor, UnitLayout};
use hpctrain_comm::host_name;
use hpctrain_config::{Config, ResolvedConfig};
use hpctrain_device::Kernels;
use hpctrain_engine::{Model, clip};
use hpctrain_nn::CustomModel;

/// The time in which a lost connection to a server must be restored.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The delay between two requests for the specification of the parameters.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Returns the directory in which the servers of a coordinator's parameters find it.
pub fn directory(run: &Path) -> PathBuf {
    run.join("parameters")
}

/// Returns the number of cores that this process may use.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Resolves the configuration of parameters.
///
/// # Errors
/// Returns an error if a setting is invalid, or parameter servers do not support it.
pub fn plan(config: &Config) -> Result<ResolvedConfig> {
    RunSpec::plan(config, 1, None, config.run.threads.unwrap_or_else(cores))
}

/// Returns the place of each tensor by name.
pub fn places(layouts: &[UnitLayout]) -> BTreeMap<String, ParamRange> {
    let mut places = BTreeMap::new();
    for (unit, layout) in layouts.iter().enumerate() {
        for (tensor, range) in layout.ranges() {
            places.insert(tensor.name.clone(), ParamRange { unit, range });
        }
    }
    places
}

/// Returns the place of a tensor.
///
/// # Errors
/// Returns an error if there is no tensor of this name.
pub fn place<'a>(places: &'a BTreeMap<String, ParamRange>, name: &str) -> Result<&'a ParamRange> {
    places.get(name).ok_or_else(|| {
        let names: Vec<&str> = places.keys().map(String::as_str).collect();
        Error::input(format!("there is no parameter {name}"))
            .hint(format!("the parameters are {}", names.join(", ")))
    })
}

/// Buffers of all units.
struct Buffers {
    units: Vec<Vec<f32>>,
}

impl Buffers {
    fn new(layouts: &[UnitLayout]) -> Self {
        Self { units: layouts.iter().map(|layout| vec![0.0; layout.padded]).collect() }
    }
}

impl PullTarget for Buffers {
    fn set(&mut self, unit: usize, range: Range<usize>, values: &[f32]) -> Result<()> {
        self.units[unit][range].copy_from_slice(values);
        Ok(())
    }

    fn on_host(&mut self, unit: usize, range: Range<usize>) -> Result<Option<&mut [f32]>> {
        Ok(Some(&mut self.units[unit][range]))
    }
}

impl PushSource for Buffers {
    fn gradients<'a>(
        &'a self,
        pieces: &[ParamRange],
        _: &'a mut Vec<f32>,
    ) -> Result<Vec<&'a [f32]>> {
        let of_piece = |ParamRange { unit, range }: &ParamRange| &self.units[*unit][range.clone()];
        Ok(pieces.iter().map(of_piece).collect())
    }
}

/// A connection to parameters on servers: of a worker's function, or of the coordinator.
///
/// It has a copy of the values, which [`Parameters::pull`] updates, and gradients, which
/// [`Parameters::push`] sends. If a server is lost, both return an error that names it. After the
/// coordinator has [restored](crate::ParameterServers::restore) the parameters, the next pull
/// connects again.
pub struct Parameters {
    run: PathBuf,
    timeout: Duration,
    terms: RunSpec,
    layouts: Vec<UnitLayout>,
    places: BTreeMap<String, ParamRange>,
    grad_clip: f64,
    /// The connections, unless they were lost.
    servers: Option<ServerConnections>,
    values: Buffers,
    gradients: Buffers,
    pulled: Pulled,
}

/// The target of the last pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pulled {
    Nothing,
    Buffers,
    Model,
}

impl Parameters {
    /// Connects to the parameters of the coordinator of the directory `run`, for which it waits.
    ///
    /// # Errors
    /// Returns an error if there are none after `timeout`.
    pub(super) fn connect(run: &Path, timeout: Duration) -> Result<Self> {
        let (terms, servers) = connect(run, timeout)?;
        let plan = plan(&terms.clone().with_held_network().config)?;
        let layouts = layouts(&plan);
        let is_custom = terms.network.is_some();
        // Models have their own buffers.
        let buffers = || Buffers::new(if is_custom { &layouts } else { &[] });
        Ok(Self {
            run: run.into(),
            timeout,
            places: places(&layouts),
            grad_clip: plan.config.optimizer.grad_clip,
            values: buffers(),
            gradients: buffers(),
            terms,
            layouts,
            servers: Some(servers),
            pulled: Pulled::Nothing,
        })
    }

    /// Returns the tensors in order.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.layouts.iter().flat_map(|layout| &layout.tensors)
    }

    fn place(&self, name: &str) -> Result<&ParamRange> {
        place(&self.places, name)
    }

    /// Returns the values of a tensor as they were pulled last, row-major.
    ///
    /// # Errors
    /// Returns an error if there is no tensor of this name, or none was pulled.
    pub fn values(&self, name: &str) -> Result<&[f32]> {
        let ParamRange { unit, range } = self.place(name)?;
        if self.pulled != Pulled::Buffers {
            return Err(Error::input(format!("the parameter {name} was not pulled"))
                .hint("call Parameters::pull before"));
        }
        Ok(&self.values.units[*unit][range.clone()])
    }

    /// Returns the gradient of a tensor that the next push sends, row-major. It is zero after each
    /// push.
    ///
    /// # Errors
    /// Returns an error if there is no tensor of this name.
    pub fn gradient(&mut self, name: &str) -> Result<&mut [f32]> {
        let ParamRange { unit, range } = self.place(name)?.clone();
        self.allocate();
        Ok(&mut self.gradients.units[unit][range])
    }

    /// Allocates the buffers, which models do not need.
    fn allocate(&mut self) {
        for buffers in [&mut self.values, &mut self.gradients] {
            if buffers.units.is_empty() {
                *buffers = Buffers::new(&self.layouts);
            }
        }
    }

    /// Pulls the values that have changed since the last pull from all servers.
    ///
    /// # Errors
    /// Returns an error if a server is lost; it names the server.
    pub fn pull(&mut self) -> Result<()> {
        self.allocate();
        let changes = self.pulled == Pulled::Buffers;
        let mut values = std::mem::replace(&mut self.values, Buffers { units: vec![] });
        let pulled = self.pull_into(&mut values, changes);
        self.values = values;
        self.pulled = if pulled.is_ok() { Pulled::Buffers } else { Pulled::Nothing };
        pulled
    }

    /// Pulls all values into a model, which has the tensors of the parameters: one that was built
    /// from [`Parameters::plan`].
    ///
    /// # Errors
    /// Returns an error if a server is lost, or the model has other tensors.
    pub fn pull_model<B: Kernels>(&mut self, model: &mut Model<B>) -> Result<()> {
        if model.sharded.layouts() != self.layouts {
            return Err(Error::input("the model has other tensors than the parameters on servers")
                .hint("build it from Parameters::plan"));
        }
        let pulled = self.pull_into(model, false);
        self.pulled = if pulled.is_ok() { Pulled::Model } else { Pulled::Nothing };
        pulled
    }

    /// Pulls values: only those that have changed since the last pull if `changes`. If the
    /// parameters were restored since, it connects again.
    fn pull_into(&mut self, target: &mut impl PullTarget, changes: bool) -> Result<()> {
        let mut servers = match self.servers.take() {
            Some(servers) => servers,
            None => self.reconnected()?,
        };
        if !changes {
            servers.forget_versions();
        }
        let before = self.terms.generation;
        let pulled = servers.pull(target, Values::Live).map_err(lost);
        let is_over = match &pulled {
            Ok(is_current) => !is_current,
            Err(e) => e.kind() == Kind::Comm,
        };
        if !is_over {
            pulled?;
            return self.keep(servers, true);
        }
        let mut servers = self.reconnected()?;
        if self.terms.generation == before {
            return pulled.and_then(|_| self.keep(servers, false));
        }
        let is_current = servers.pull(target, Values::Live).map_err(lost)?;
        self.keep(servers, is_current)
    }

    /// Connects again, to the same tensors.
    fn reconnected(&mut self) -> Result<ServerConnections> {
        let (terms, servers) = connect(&self.run, self.timeout)?;
        let plan = plan(&terms.clone().with_held_network().config)?;
        if layouts(&plan) != self.layouts {
            return Err(Error::input("the parameters on servers have other tensors now")
                .hint("connect to them anew"));
        }
        self.terms = terms;
        Ok(servers)
    }

    /// Keeps connections if the servers still hold the parameters.
    fn keep(&mut self, servers: ServerConnections, is_current: bool) -> Result<()> {
        if is_current {
            self.servers = Some(servers);
            return Ok(());
        }
        let servers = self.terms.addresses.join(", ");
        Err(Error::comm(format!(
            "a parameter server of {servers} has restarted, or the parameters were restored since \
             the last pull"
        ))
        .hint("pull again; if a server has restarted, restore the parameters before"))
    }

    /// Sends the gradients to all servers, which update the parameters with them, and clears them.
    /// The gradients are clipped by their common norm (`optimizer.grad_clip`). Returns the largest
    /// staleness of a range: the number of pushes that were applied since this process has pulled.
    ///
    /// # Errors
    /// Returns an error if a gradient is not finite, nothing was pulled before, or a server is
    /// lost; it names the tensor or the server. If a server is lost, the others may have applied
    /// the push.
    pub fn push(&mut self) -> Result<u64> {
        self.allocate();
        let norm = self.norm();
        let mut gradients = std::mem::replace(&mut self.gradients, Buffers { units: vec![] });
        let pushed = norm.and_then(|norm| self.push_from(&gradients, norm));
        gradients.units.iter_mut().for_each(|unit| unit.fill(0.0));
        self.gradients = gradients;
        pushed
    }

    /// Returns the common norm of the gradients of all trained tensors.
    fn norm(&self) -> Result<f64> {
        let mut sum = 0.0;
        for (unit, layout) in self.layouts.iter().enumerate() {
            for (tensor, range) in layout.ranges() {
                let gradient = &self.gradients.units[unit][range];
                let square: f64 = gradient.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
                if !square.is_finite() {
                    let message = format!("the gradient of {} is not finite", tensor.name);
                    return Err(Error::numeric(message).hint("lower the learning rate"));
                }
                if tensor.average.is_none() {
                    sum += square;
                }
            }
        }
        Ok(sum.sqrt())
    }

    /// Sends the reduced gradients of a model, of norm `norm`, to all servers, which update the
    /// parameters with them, and discards them. Returns the same as [`Parameters::push`].
    ///
    /// # Errors
    /// Returns an error if the norm is not finite, the model has no gradients, nothing was pulled
    /// before, or a server is lost.
    pub fn push_model<B: Kernels>(&mut self, model: &mut Model<B>, norm: f64) -> Result<u64> {
        let pushed = match norm.is_finite() {
            true => self.push_from(model, norm),
            false => Err(Error::numeric(format!("the gradient norm is {norm}"))
                .hint("lower the learning rate")),
        };
        model.sharded.skip()?;
        pushed
    }

    fn push_from(&mut self, source: &impl PushSource, norm: f64) -> Result<u64> {
        let Some(mut servers) = self.servers.take_if(|_| self.pulled != Pulled::Nothing) else {
            return Err(Error::input("the parameters were not pulled since they were connected")
                .hint("pull them before each push"));
        };
        let scale = (clip(self.grad_clip, norm) as f32).to_bits();
        let versions = servers.versions();
        let of = |server: usize, pieces: Range<usize>| Pushed::Batch {
            // No ticket is revoked.
            ticket: 0,
            scale,
            versions: versions[server][pieces].to_vec(),
        };
        let staleness = servers.push(source, of).map_err(lost)?;
        self.keep(servers, staleness.is_some())?;
        Ok(staleness.unwrap_or(0))
    }

    /// Replaces values on the servers, and clears the optimizer state.
    ///
    /// # Errors
    /// Returns an error if there is no tensor of a name, or a server is lost.
    pub(super) fn write(&mut self, values: &BTreeMap<String, Vec<f32>>) -> Result<()> {
        self.pull()?;
        for (name, values) in values {
            let ParamRange { unit, range } = self.place(name)?.clone();
            self.values.units[unit][range].copy_from_slice(values);
        }
        let Some(mut servers) = self.servers.take() else { return Ok(()) };
        let is_current = servers.write(&self.values.units).map_err(lost)?;
        self.keep(servers, is_current)
    }

    /// Resolves the configuration of the model whose tensors the parameters are, for a worker with
    /// these compute threads; `network` is the custom network of this program, if the model is one.
    ///
    /// # Errors
    /// Returns an error if the parameters are not those of a model, or of another custom network.
    pub fn plan(&self, network: Option<&CustomModel>, threads: usize) -> Result<ResolvedConfig> {
        self.terms.clone().with_program(network, None)?.worker_plan(threads, false)
    }
}

/// Adds a hint to the error of a lost server, which it names.
fn lost(error: Error) -> Error {
    match error.kind() {
        Kind::Comm => error
            .at("a parameter server was lost")
            .hint("start another server, and restore the parameters from their last checkpoint"),
        _ => error,
    }
}

/// Waits until parameters are created in the directory `run`, and connects to their servers.
fn connect(run: &Path, timeout: Duration) -> Result<(RunSpec, ServerConnections)> {
    let absent = |error: Error| {
        error.hint("the coordinator's program must call Coordinator::create_parameters")
    };
    let site = PsRendezvous::for_run(&directory(run));
    let request = CoordinatorRequest::Terms { host: host_name(), process: std::process::id() };
    let since = Instant::now();
    let (terms, credentials) = loop {
        let contact = site.coordinator(timeout).map_err(absent)?;
        let credentials = site.credentials(&contact)?;
        let mut coordinator =
            RpcClient::new("the coordinator", contact.address, credentials.clone(), timeout);
        match coordinator.call_once(&request) {
            Ok(CoordinatorResponse::Terms(terms)) => break (*terms, credentials),
            // The address may be that of an earlier coordinator.
            Ok(_) | Err(_) if since.elapsed() < timeout => std::thread::sleep(RETRY_DELAY),
            Ok(_) => {
                let message =
                    format!("there were no parameters on servers for {} s", timeout.as_secs());
                return Err(absent(Error::comm(message)));
            }
            Err(e) => return Err(absent(e.at("the coordinator"))),
        }
    };
    // Servers recognize repeated pushes by this number, so no other connection may have it.
    let member = RandomState::new().build_hasher().finish();
    let servers = ServerConnections::new(&terms, member, |address| {
        RpcClient::new("the server", address, credentials.clone(), timeout)
            .with_reconnect_timeout(RECONNECT_TIMEOUT)
    });
    Ok((terms, servers))
}
