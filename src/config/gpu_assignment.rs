//! Assignment of GPUs to ranks.
//!
//! Ranks exchange lists of the GPUs that they see, and each computes the same assignment. A rank
//! that sees one GPU only, because a batch system bound it, takes that one.
//!
//! A rank takes the least used GPU, near its cores if possible.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::topology::{Topology, parse_list};
use crate::{
    self as config, Compute, Config, DEFAULT_FRACTION, DeviceChoice, DeviceMemory, ResolvedConfig,
    WorkShares,
};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::simd;
use hpctrain_comm::{AlgorithmChoice, Comm, LocalDevice, TransportChoice};
use hpctrain_cpu::{Cpu, MatmulBackend};
use hpctrain_cuda::{Arithmetic, Cuda, Device, PoolBudget, Precision, devices, libraries};
use hpctrain_device::{Backend, format_bytes};

/// Bytes of GPU memory that are enough for probes.
const SMALL: usize = 64 << 20;

/// The cost if ranks of a node see different GPUs.
pub const COST_OF_HIDDEN_GPUS: &str = "NCCL copies through host memory instead of NVLink, \
    and CUDA-aware MPI and CUDA IPC cannot open the memory of a hidden GPU";

/// How to start ranks that see all GPUs of their node.
pub const SHOW_ALL_GPUS: &str = "srun --gpus-per-node=N --gpu-bind=none, without \
    --gpus-per-task: each rank sees all GPUs of its node, and hpctrain assigns one to each, near \
    the rank's cores";

/// A GPU as a rank sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Seen {
    /// The identity of the GPU, or of a slice of it, which is the same on all ranks of the node.
    id: String,
    name: String,
    pci: String,
    memory: usize,
    /// Whether it is attached to the processor whose cores the rank has.
    is_near: bool,
}

/// The GPUs that a rank sees, or the reason why it sees none.
type View = std::result::Result<Vec<Seen>, String>;

/// The GPU of this rank.
#[derive(Clone)]
pub struct Gpu {
    device: Device,
    /// Bytes of its memory for this rank; the most, if the pool grows.
    pub memory: usize,
    /// Whether memory is allocated as it is needed.
    grows: bool,
    /// Whether NCCL's buffers count as a part of `memory`: unless `device.memory` is a size, which
    /// is that of the pool.
    pub includes_nccl: bool,
    /// The number of ranks that share it, this one included.
    pub sharers: usize,
    /// Whether ranks of this node see other GPUs than this one does.
    is_isolated: bool,
    /// Whether `comm.algorithm` is the vendor's.
    needs_vendor: bool,
    /// The first host on which the launcher hides GPUs from ranks, if there is one.
    hiding_host: Option<String>,
}

/// The devices of the ranks of a job.
#[derive(Clone)]
pub struct Devices {
    /// The GPU of this rank; `None` if it computes on the CPU.
    pub gpu: Option<Gpu>,
    /// Whether some ranks compute on GPUs and others on CPUs.
    pub is_mixed: bool,
    /// The device of every rank, one line each; none if all compute on CPUs.
    pub table: Vec<String>,
}

impl Devices {
    /// Returns notes for the startup summary: what hidden GPUs, and different devices, cost.
    pub fn notes(&self) -> Vec<String> {
        let of_gpus = self.gpu.iter().flat_map(Gpu::notes);
        let of_mixed = self.is_mixed.then(|| {
            "CPUs and GPUs round differently: the bits of this run depend on which ranks have a GPU"
                .to_string()
        });
        of_gpus.chain(of_mixed).collect()
    }
}

impl Gpu {
    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns true if ranks of this node see different GPUs, for example because a batch system
    /// binds each rank to its own.
    pub fn is_isolated(&self) -> bool {
        self.is_isolated
    }

    /// Returns the first host on which the launcher hides GPUs from ranks that could use them, if
    /// there is one. A rank never sees more than its own slice of a GPU (MIG): slices do not count.
    pub fn hiding_host(&self) -> Option<&str> {
        self.hiding_host.as_deref()
    }

    /// Returns notes for the startup summary: what hidden GPUs cost, and how to show them.
    pub fn notes(&self) -> Vec<String> {
        let Some(host) = &self.hiding_host else { return Vec::new() };
        vec![
            format!("ranks on {host} see different GPUs: {COST_OF_HIDDEN_GPUS}"),
            format!("hint: {SHOW_ALL_GPUS}"),
        ]
    }

    /// Opens the device with the number format, memory and logging of `plan`.
    ///
    /// # Errors
    /// Returns an error if a library is missing, or the device has too little free memory.
    pub fn backend(&self, plan: &ResolvedConfig) -> Result<Cuda> {
        let precision = match plan.config.precision.dtype {
            Compute::Auto | Compute::Bf16 => Precision::Bf16,
            Compute::F32 => Precision::F32(Arithmetic::Full),
            Compute::Tf32 => Precision::F32(Arithmetic::Tf32),
        };
        let memory = PoolBudget { bytes: self.memory, grows: self.grows };
        Cuda::with_options(&self.device, memory, precision, plan.config.log.placement)
    }

    /// Returns the name of the device, with all properties that determine the bits it computes.
    ///
    /// # Errors
    /// Returns an error if cuBLASLt is missing.
    pub fn name(&self) -> Result<String> {
        gpu_name(&self.device)
    }

    /// Returns a communicator for buffers of this device.
    pub fn device_comm(&self, comm: &Comm<Cpu>) -> Comm<Cuda> {
        let device = self.device.clone();
        let own = LocalDevice::new(self.device.id.clone(), move |bytes| open_small(&device, bytes));
        comm.on().with_local_device(
            own.with_isolation(self.is_isolated)
                .with_growing_memory(self.grows)
                .with_vendor_collectives(self.needs_vendor)
                .with_bus_bandwidth(self.device.bus_bandwidth()),
        )
    }

    /// Opens the device for probes, with little memory and in f32.
    ///
    /// # Errors
    /// Returns an error if a library is missing, or the device has too little free memory.
    pub fn open_for_probe(&self) -> Result<Cuda> {
        open_for_probe(&self.device)
    }
}

/// Opens a device for probes, with little memory and in f32.
///
/// # Errors
/// Returns an error if a library is missing, or the device has too little free memory.
pub fn open_for_probe(device: &Device) -> Result<Cuda> {
    open_small(device, 0)
}

/// Opens a device for probes, with `bytes` bytes besides the little memory that they need.
fn open_small(device: &Device, bytes: usize) -> Result<Cuda> {
    Cuda::new(device, SMALL + bytes, Precision::F32(Arithmetic::Full))
}

/// Returns the implementation of GEMMs on the CPU.
fn gemms(config: &Config) -> MatmulBackend {
    if config.precision.dtype == Compute::Bf16 {
        MatmulBackend::bf16()
    } else {
        MatmulBackend::Builtin
    }
}

/// Opens the CPU as the device of a rank.
///
/// # Errors
/// Returns an error if the CPU does not support the number format, or the system refuses a thread.
pub fn open_cpu(plan: &ResolvedConfig) -> Result<Cpu> {
    Cpu::new(plan.threads).with_all_threads()?.with_matmul_backend(gemms(&plan.config))
}

fn gpu_name(device: &Device) -> Result<String> {
    let (major, minor) = device.capability;
    let library = libraries::cublaslt()?;
    Ok(format!("{} (compute capability {major}.{minor}, cuBLASLt {library})", device.name))
}

/// Returns the name of the device that ranks of this configuration compute on here, with all that
/// determines the bits: that of the first GPU, or of the CPU if it is not to be a GPU or there is
/// none.
pub fn platform(config: &Config) -> String {
    let gpu = (config.run.device != DeviceChoice::Cpu)
        .then(|| Device::open(0).and_then(|device| gpu_name(&device)).ok());
    gpu.flatten().unwrap_or_else(|| cpu_name(config))
}

/// Returns the name of the CPU as a device, with all that determines the bits it computes with this
/// configuration.
pub fn cpu_name(config: &Config) -> String {
    let gemms = match gemms(config) {
        MatmulBackend::Builtin => "",
        MatmulBackend::BuiltinBf16 => ", bf16",
        MatmulBackend::OneDnn => ", oneDNN",
        MatmulBackend::OneDnnBf16 => ", bf16 by oneDNN",
    };
    format!("CPU ({}{gemms})", simd::name())
}

/// Checks that the CPU supports the number format of a configuration.
///
/// # Errors
/// Returns an error if the format is bf16 and the CPU does not multiply it, or oneDNN is missing.
pub fn check_cpu(config: &Config) -> Result<()> {
    gemms(config).check()
}

/// Assigns a GPU to each rank of `comm`; returns `None` if ranks compute on the CPU.
/// `run.device = mixed`, which is for training, counts as `auto`. Collective.
///
/// # Errors
/// Returns an error in the same cases as [`assign_devices`].
pub fn assign_gpus<B: Backend>(comm: &Comm<B>, config: &Config) -> Result<Option<Gpu>> {
    let choice = match config.run.device {
        DeviceChoice::Mixed => DeviceChoice::Auto,
        other => other,
    };
    Ok(assign_as(comm, config, choice)?.gpu)
}

/// Assigns a device to each rank of `comm`. Collective.
///
/// # Errors
/// Returns an error if `run.device` asks for GPUs that are not there, if there are fewer than
/// the ranks or `comm.transport` need, or if `device.memory` exceeds the memory of a GPU.
pub fn assign_devices<B: Backend>(comm: &Comm<B>, config: &Config) -> Result<Devices> {
    assign_as(comm, config, config.run.device)
}

fn assign_as<B: Backend>(comm: &Comm<B>, config: &Config, choice: DeviceChoice) -> Result<Devices> {
    let world = comm.world();
    let only_cpus = Devices { gpu: None, is_mixed: false, table: vec![] };
    if choice == DeviceChoice::Cpu {
        return Ok(only_cpus);
    }
    let topology = Topology::gather(&world, comm.node().host)?;
    let mut opened = Vec::new();
    let mine: View = visible_gpus(&topology, &mut opened).map_err(|e| e.to_string());
    let message = serde_json::to_vec(&mine).map_err(|e| Error::internal(e.to_string()))?;
    let messages = world.gather_bytes(message).wait()?;
    let views = messages.iter().map(|bytes| serde_json::from_slice(bytes));
    let views = views.collect::<Result<Vec<View>, _>>();
    let mut views = views
        .map_err(|e| Error::comm(format!("another rank sent a malformed list of GPUs: {e}")))?;
    if choice == DeviceChoice::Mixed {
        // GPUs are for the ranks that compute.
        let idle = (0..views.len()).filter(|rank| is_idle(config, *rank));
        idle.for_each(|rank| views[rank] = Ok(vec![]));
    }
    let chosen = assign(choice, &views, &topology.hosts(), config.device.ranks_per_gpu)?;
    // The ranks with a GPU.
    let with_gpu: Vec<usize> = (0..chosen.len()).filter(|rank| chosen[*rank].is_some()).collect();
    if with_gpu.is_empty() {
        if choice == DeviceChoice::Mixed && world.rank() == 0 {
            log::warn!("run.device = mixed, but no rank sees a GPU: all compute on CPUs");
        }
        return Ok(only_cpus);
    }
    let is_mixed = with_gpu.len() < chosen.len();
    let seen = |rank: usize| -> Option<&Seen> { views[rank].as_deref().ok()?.get(chosen[rank]?) };
    let sharers = |rank: usize| -> Vec<usize> {
        let others = with_gpu.iter().copied();
        let others = others.filter(|&other| topology.host(other) == topology.host(rank));
        let id = |rank| seen(rank).map(|seen| &seen.id);
        others.filter(|&other| id(other) == id(rank)).collect()
    };
    let shared = with_gpu.iter().map(|&rank| sharers(rank)).find(|ranks| ranks.len() > 1);
    if let (TransportChoice::Nccl, Some(ranks)) = (config.comm.transport, shared)
        && let Some(Seen { name, pci, .. }) = seen(ranks[0])
    {
        let host = topology.host(ranks[0]);
        let ranks: Vec<_> = ranks.iter().map(usize::to_string).collect();
        let message = format!("ranks {} on {host} share {name} at {pci}", ranks.join(", "));
        return Err(Error::input(format!(
            "comm.transport = nccl requires a GPU for every rank: {message}"
        ))
        .hint("set comm.transport=host-staged, or start fewer ranks")
        .shared());
    }
    let memory = |rank: usize| {
        seen(rank).map_or(0, |seen| share(&config.device, seen.memory, sharers(rank).len()))
    };
    for &rank in &with_gpu {
        let Some(Seen { name, pci, memory: whole, .. }) = seen(rank) else { continue };
        let all = memory(rank).saturating_mul(sharers(rank).len());
        if all > *whole {
            let host = topology.host(rank);
            let given = config.device.memory;
            let whole = format_bytes(*whole);
            let ranks = sharers(rank).len();
            let each =
                if ranks > 1 { format!(" for each of {ranks} ranks") } else { String::new() };
            let message =
                format!("device.memory = {given}{each}: {name} at {pci} on {host} has {whole}");
            return Err(Error::input(message)
                .hint("set it lower, or to a part such as 0.9, which all ranks on a GPU share")
                .shared());
        }
    }
    let grows = config.device.memory == DeviceMemory::Grow;
    let includes_nccl = grows || matches!(config.device.memory, DeviceMemory::Fraction(_));
    let table = (0..chosen.len())
        .map(|rank| match seen(rank) {
            Some(gpu) => line(&topology, rank, gpu, memory(rank), grows),
            None => {
                let host = topology.host(rank);
                format!("rank {rank} on {host}: CPU, cores {}", topology.cores(rank))
            }
        })
        .collect();
    let rank = world.rank();
    let Some(number) = chosen[rank] else { return Ok(Devices { gpu: None, is_mixed, table }) };
    let device = opened.swap_remove(number);
    let hosts = topology.hosts();
    let is_isolated = (0..views.len())
        .any(|other| hosts[other] == hosts[rank] && ids(&views[other]) != ids(&views[rank]));
    let gpu = Gpu {
        device,
        memory: memory(rank),
        grows,
        includes_nccl,
        sharers: sharers(rank).len(),
        is_isolated,
        needs_vendor: config.comm.algorithm == AlgorithmChoice::Vendor,
        hiding_host: if is_mixed { None } else { hiding_host(&views, &hosts) },
    };
    Ok(Devices { gpu: Some(gpu), is_mixed, table })
}

/// Returns the identities of the GPUs that a rank sees.
fn ids(view: &View) -> BTreeSet<&str> {
    view.iter().flatten().map(|seen| &seen.id[..]).collect()
}

/// Returns the first host whose ranks see different GPUs that are not slices of one.
fn hiding_host(views: &[View], hosts: &[String]) -> Option<String> {
    let mut first_on: HashMap<&str, &View> = HashMap::new();
    let mut ranks = views.iter().zip(hosts);
    let found = ranks.find(|(view, host)| {
        let first: &View = first_on.entry(host.as_str()).or_insert(view);
        let is_slice = |seen: &Seen| seen.name.contains(" MIG ");
        ids(first) != ids(view) && !first.iter().chain(view.iter()).flatten().all(is_slice)
    });
    found.map(|(_, host)| host.clone())
}

/// Returns the line of a rank in the table of GPUs; the rank may take `own` bytes of `gpu`.
fn line(topology: &Topology, rank: usize, gpu: &Seen, own: usize, grows: bool) -> String {
    let Seen { name, pci, memory: whole, .. } = gpu;
    let host = topology.host(rank);
    let own = format_bytes(own);
    let own = if grows { format!("up to {own}") } else { own };
    format!(
        "rank {rank} on {host}: {name} at {pci}, {own} of {}, cores {}",
        format_bytes(*whole),
        topology.cores(rank)
    )
}

/// Returns the bytes that each of `ranks` ranks on a GPU with `whole` bytes may take.
fn share(device: &config::Device, whole: usize, ranks: usize) -> usize {
    let bytes = match device.memory {
        DeviceMemory::Bytes(bytes) => bytes.0,
        DeviceMemory::Fraction(fraction) => (whole as f64 * fraction) as usize / ranks,
        DeviceMemory::Grow => (whole as f64 * DEFAULT_FRACTION) as usize / ranks,
    };
    device.memory_limit.map_or(bytes, |limit| bytes.min(limit.0))
}

/// Opens the GPUs that this rank sees and describes them.
fn visible_gpus(topology: &Topology, opened: &mut Vec<Device>) -> Result<Vec<Seen>> {
    for number in 0..devices()? {
        opened.push(Device::open(number)?);
    }
    let seen = opened.iter().map(|device| Seen {
        id: device.id.clone(),
        name: device.name.clone(),
        pci: device.pci.clone(),
        memory: device.memory,
        is_near: near_cores(&device.pci)
            .is_none_or(|cores| !cores.is_disjoint(&topology.here().cores)),
    });
    Ok(seen.collect())
}

/// Returns the cores of the processor that a PCI device is attached to, if the system knows them.
pub fn near_cores(pci: &str) -> Option<BTreeSet<usize>> {
    let path = Path::new("/sys/bus/pci/devices").join(pci).join("local_cpulist");
    parse_list(std::fs::read_to_string(path).ok()?.trim())
}

/// Returns whether a data-parallel rank computes no gradients: an owner of central storage with the
/// share 0.
fn is_idle(config: &Config, rank: usize) -> bool {
    match &config.parallel.work_shares {
        WorkShares::Given(shares) => shares.get(rank) == Some(&0.0),
        WorkShares::Equal | WorkShares::Auto => false,
    }
}

/// Returns the number of each rank's GPU among those it sees; `None` if it computes on the CPU.
fn assign(
    choice: DeviceChoice,
    views: &[View],
    hosts: &[String],
    ranks_per_gpu: usize,
) -> Result<Vec<Option<usize>>> {
    let is_mixed = choice == DeviceChoice::Mixed;
    let any_sees = views.iter().any(|view| view.as_ref().is_ok_and(|seen| !seen.is_empty()));
    if choice == DeviceChoice::Auto && !any_sees {
        return Ok(vec![None; views.len()]);
    }
    let mut users: HashMap<(&str, &str), usize> = HashMap::new();
    let mut chosen = Vec::with_capacity(views.len());
    for (rank, (view, host)) in views.iter().zip(hosts).enumerate() {
        let none = |why: &str| {
            no_gpu(&format!("run.device = {choice}: rank {rank} on {host}"), why, any_sees)
        };
        let seen = match view {
            Ok(seen) if !seen.is_empty() => seen,
            _ if is_mixed => {
                chosen.push(None);
                continue;
            }
            Ok(_) => return Err(none("it sees none")),
            Err(why) => return Err(none(why)),
        };
        let load = |number: usize| {
            users.get(&(host.as_str(), seen[number].id.as_str())).copied().unwrap_or(0)
        };
        let among: Vec<usize> = match choice {
            DeviceChoice::CudaAt(numbers) => numbers.iter().collect(),
            _ => (0..seen.len()).collect(),
        };
        if among.iter().any(|number| *number >= seen.len()) {
            let message = format!("run.device = {choice}, but {host} has {}", count(seen.len()));
            return Err(Error::input(message)
                .hint(format!("cuda:0 to cuda:{}", seen.len() - 1))
                .shared());
        }
        // Prefers the least used GPU, then one near the cores, then the first.
        let least = among.iter().min_by_key(|&&number| (load(number), !seen[number].is_near));
        let number = least.copied().unwrap_or(0);
        if load(number) == ranks_per_gpu && is_mixed {
            chosen.push(None);
            continue;
        }
        if load(number) == ranks_per_gpu {
            let ranks = hosts.iter().filter(|other| *other == host).count();
            let wanted = ranks.div_ceil(among.len());
            let message = format!("{ranks} ranks on {host} are to share {}", count(among.len()));
            let hint = format!(
                "start fewer ranks, or set device.ranks_per_gpu={wanted} to let them share"
            );
            return Err(Error::input(message).hint(hint).shared());
        }
        *users.entry((host.as_str(), seen[number].id.as_str())).or_default() += 1;
        chosen.push(Some(number));
    }
    Ok(chosen)
}

/// Returns the error of a rank without a GPU; `any_sees` is whether any rank sees one.
fn no_gpu(rank: &str, why: &str, any_sees: bool) -> Error {
    let hint = "set run.device=cpu to compute without GPUs; in hpctrain train, run.device=mixed lets ranks without a GPU compute on the CPU, and --servers N lets them hold the parameters";
    let (why, own) = why.split_once("\nhint: ").unwrap_or((why, hint));
    // If others see GPUs, ranks without one may be servers.
    let hint = if any_sees { hint } else { own };
    Error::input(format!("{rank} has no GPU: {why}")).hint(hint).shared()
}

/// Returns a number of GPUs as text: `1 GPU`, `4 GPUs`.
fn count(gpus: usize) -> String {
    format!("{gpus} GPU{}", if gpus == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(ids: &[(&str, bool)]) -> View {
        Ok(ids.iter().map(|(id, is_near)| gpu(id, *is_near)).collect())
    }

    /// Returns a GPU with this identity.
    fn gpu(id: &str, is_near: bool) -> Seen {
        Seen {
            id: id.into(),
            name: "GPU".into(),
            pci: "0000:01:00.0".into(),
            memory: 1 << 30,
            is_near,
        }
    }

    /// Returns the bytes that each of `ranks` ranks on a GPU with 1000 bytes may take.
    fn share_of(memory: DeviceMemory, limit: Option<usize>, ranks: usize) -> usize {
        let device = config::Device {
            memory,
            memory_limit: limit.map(config::Size),
            ranks_per_gpu: ranks,
            ..Default::default()
        };
        share(&device, 1000, ranks)
    }

    fn shared(
        choice: DeviceChoice,
        views: &[View],
        per_gpu: usize,
    ) -> Result<Vec<Option<usize>>, String> {
        assign(choice, views, &vec!["n".to_string(); views.len()], per_gpu)
            .map_err(|e| e.to_string())
    }

    #[test]
    fn each_rank_takes_one_that_is_near() {
        let both = gpus(&[("a", false), ("b", true)]);
        let auto = DeviceChoice::Auto;
        assert_eq!(shared(auto, &[both.clone(), both.clone()], 1), Ok(vec![Some(1), Some(0)]));
        assert_eq!(shared(auto, &vec![both.clone(); 4], 2), Ok([1, 0, 1, 0].map(Some).to_vec()));
        // Bound by the batch system: every rank sees its own as the first.
        assert_eq!(
            shared(auto, &[gpus(&[("a", true)]), gpus(&[("b", true)])], 1),
            Ok(vec![Some(0); 2])
        );
    }

    #[test]
    fn a_choice_of_several_gpus_is_assigned() {
        let three = gpus(&[("a", true), ("b", true), ("c", true)]);
        let some: DeviceChoice = "cuda:0,2".parse().unwrap();
        assert_eq!(shared(some, &vec![three.clone(); 2], 1), Ok(vec![Some(0), Some(2)]));
        assert_eq!(shared(some, &vec![three.clone(); 4], 2), Ok([0, 2, 0, 2].map(Some).to_vec()));
        assert_eq!(
            shared("cuda:1".parse().unwrap(), &vec![three.clone(); 2], 2),
            Ok(vec![Some(1); 2])
        );
        let error = shared(some, &vec![three; 3], 1).unwrap_err();
        assert!(
            error.contains("3 ranks on n are to share 2 GPUs") && error.contains("ranks_per_gpu=2"),
            "{error}"
        );
        let error = shared(some, &[gpus(&[("a", true), ("b", true)])], 1).unwrap_err();
        assert!(
            error.contains("run.device = cuda:0,2, but n has 2 GPUs\nhint: cuda:0 to cuda:1"),
            "{error}"
        );
    }

    #[test]
    fn ranks_take_parts_sizes_or_as_much_as_they_need() {
        let bytes = DeviceMemory::Bytes(config::Size(300));
        let grow = DeviceMemory::Grow;
        assert_eq!(
            (
                share_of(DeviceMemory::Fraction(0.5), None, 1),
                share_of(DeviceMemory::Fraction(0.5), None, 2)
            ),
            (500, 250)
        );
        assert_eq!((share_of(bytes, None, 1), share_of(bytes, None, 2)), (300, 300));
        assert_eq!((share_of(grow, None, 1), share_of(grow, None, 3)), (900, 300));
        assert_eq!(
            (
                share_of(grow, Some(100), 1),
                share_of(bytes, Some(100), 2),
                share_of(bytes, Some(400), 2)
            ),
            (100, 100, 300)
        );
    }

    #[test]
    fn nodes_may_have_different_numbers() {
        let two = gpus(&[("a", true), ("b", true)]);
        let one = gpus(&[("a", true)]);
        let hosts = ["m", "m", "n"].map(String::from);
        let chosen = assign(DeviceChoice::Auto, &[two.clone(), two, one], &hosts, 1);
        assert_eq!(chosen.map_err(|e| e.to_string()), Ok([0, 1, 0].map(Some).to_vec()));
    }

    #[test]
    fn ranks_without_a_free_gpu_compute_on_the_cpu() {
        let one = gpus(&[("a", true)]);
        let none: View = Err("no CUDA driver".into());
        let mixed = |views: &[View], per_gpu| shared(DeviceChoice::Mixed, views, per_gpu);
        let three = [one.clone(), one.clone(), one];
        assert_eq!(mixed(&three, 1), Ok(vec![Some(0), None, None]));
        assert_eq!(mixed(&three, 2), Ok(vec![Some(0), Some(0), None]));
        let some = [none.clone(), three[0].clone(), Ok(vec![])];
        assert_eq!(mixed(&some, 1), Ok(vec![None, Some(0), None]));
        assert_eq!(mixed(&[none.clone(), none], 1), Ok(vec![None; 2]));
    }

    #[test]
    fn hosts_that_hide_gpus_are_found() {
        let both = gpus(&[("a", true), ("b", true)]);
        let one = gpus(&[("a", true)]);
        let other = gpus(&[("b", true)]);
        let hosts = ["m", "m", "n", "n"].map(String::from);
        let found = |views: [&View; 4]| hiding_host(&views.map(Clone::clone), &hosts);
        assert_eq!(found([&both, &both, &both, &both]), None);
        assert_eq!(found([&both, &both, &one, &one]), None);
        assert_eq!(found([&both, &both, &one, &other]), Some("n".into()));
        assert_eq!(found([&one, &both, &one, &other]), Some("m".into()));
        let slice = |id: &str| -> View {
            Ok(vec![Seen { name: "A100 MIG 1g.5gb".into(), ..gpu(id, true) }])
        };
        assert_eq!(found([&slice("a"), &slice("b"), &both, &both]), None);
    }

    #[test]
    fn an_error_for_too_many_ranks_suggests_how_to_share() {
        let error = shared(DeviceChoice::Auto, &vec![gpus(&[("a", true)]); 3], 1).unwrap_err();
        assert!(
            error.contains("3 ranks on n are to share 1 GPU\nhint: ")
                && error.contains("ranks_per_gpu=3"),
            "{error}"
        );
    }

    #[test]
    fn missing_gpus_are_an_error_unless_the_choice_is_auto() {
        let none: View = Err("no CUDA driver\nhint: do without".into());
        assert_eq!(shared(DeviceChoice::Auto, &[none.clone(), none.clone()], 1), Ok(vec![None; 2]));
        let error = shared(DeviceChoice::Cuda, std::slice::from_ref(&none), 1).unwrap_err();
        assert!(
            error.contains("rank 0 on n has no GPU: no CUDA driver\nhint: do without"),
            "{error}"
        );
        let error = shared(DeviceChoice::Auto, &[gpus(&[("a", true)]), none], 1).unwrap_err();
        assert!(
            error.contains("rank 1 on n has no GPU") && error.contains("run.device=mixed"),
            "{error}"
        );
        let error =
            shared("cuda:7".parse().unwrap(), &[gpus(&[("a", true), ("b", true)])], 1).unwrap_err();
        assert!(
            error.contains("run.device = cuda:7, but n has 2 GPUs\nhint: cuda:0 to cuda:1"),
            "{error}"
        );
    }
}
