//! `hpctrain plan`: searches the parallel layouts of a model on N ranks, and prints the fastest
//! that fits first.

use clap::Args;

use super::train::SourceArgs;
use crate::backend::Kernels;
use crate::backend::cpu::Cpu;
use crate::comm::{Comm, Launch};
use crate::config::{Config, LayoutMode, ResolvedConfig};
use crate::engine::memory::{self, BaselineMemory};
use crate::engine::on_threads;
use crate::error::{Error, Result};
use crate::gpu_assignment::{assign_gpus, check_cpu, open_cpu};
use crate::job::{self, fail};
use crate::planner::{
    Machine, PlanReport, SearchEnvironment, SearchLimits, check_batch, environment, run_trials,
    search_layouts, search_layouts_here,
};
use crate::telemetry::say;

/// The number of layouts shown without `--all`.
const SHOWN_LAYOUTS: usize = 10;

/// Arguments of `hpctrain plan`.
#[derive(Args)]
#[command(
    after_help = "Keys of [parallel], and batch.micro, that a file or --set sets are not searched.\n\
                        Example: mpirun -np 4 hpctrain plan --preset gpt-baby --measure"
)]
pub struct PlanArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Number of ranks [default: those that mpirun or srun starts]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    ranks: Option<u32>,
    /// Number of nodes, with the same number of ranks on each [default: as many as the description
    /// of the machine requires, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "measure")]
    nodes: Option<u32>,
    /// The machine: dgx-h100, hgx-h200, h100x4-ndr200, h100x8-ndr1, perlmutter, a100x8, or a file
    /// [default: this machine, roughly estimated]
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "measure")]
    machine: Option<String>,
    /// Benchmark blocks and collectives on all ranks: those of mpirun, or threads of this process.
    #[arg(long)]
    measure: bool,
    /// Run some steps of the first N layouts as well, and sort them by the measured time.
    #[arg(long = "try", value_name = "N", default_value_t = 0, requires = "measure")]
    tries: usize,
    /// Show every layout, including those that were rejected.
    #[arg(long)]
    all: bool,
    /// Print one JSON object instead of the table.
    #[arg(long)]
    json: bool,
}

/// Runs one rank and returns its exit code.
pub fn run(args: &PlanArgs, launch: Option<&Launch>) -> i32 {
    if launch.is_none() && args.measure {
        return plan_on_threads(args).map_or_else(|e| fail(&e), |()| 0);
    }
    job::run(launch, super::with_checkpoint::comm_timeout(&[]), |comm| {
        let world = comm.world();
        let (config, name) = world.all_ok(args.load())?;
        if !args.measure {
            let ranks = args.ranks.map_or(comm.size(), |ranks| ranks as usize);
            return world
                .all_ok(if comm.rank() == 0 {
                    plan_described(args, &config, &name, ranks)
                } else {
                    Ok(())
                })
                .map(|()| 0);
        }
        world.all_ok(args.check_ranks(comm.size()))?;
        match assign_gpus(comm, &config)? {
            None => {
                world.all_ok(check_cpu(&config))?;
                plan_measured(
                    args,
                    &config,
                    &name,
                    &SearchEnvironment {
                        comm,
                        backend: open_cpu,
                        gpu: None,
                        threads: None,
                        vocabulary: None,
                        replaced: 0,
                    },
                )?;
            }
            Some(gpu) => {
                let comm = &gpu.device_comm(comm);
                let here = SearchEnvironment {
                    comm,
                    backend: |plan: &ResolvedConfig| gpu.backend(plan),
                    gpu: Some(gpu.memory),
                    threads: None,
                    vocabulary: None,
                    replaced: 0,
                };
                plan_measured(args, &config, &name, &here)?;
            }
        }
        Ok(0)
    })
}

impl PlanArgs {
    fn load(&self) -> Result<(Config, String)> {
        let (mut config, name) = self.sources.load()?;
        config.parallel.layout = LayoutMode::Given;
        check_batch(&config)?;
        Ok((config.with_any_length(), name))
    }

    /// Refuses `--ranks` other than the number of ranks that run, which are those measured.
    fn check_ranks(&self, started: usize) -> Result<()> {
        match self.ranks {
            Some(ranks) if ranks as usize != started => Err(Error::input(format!(
                "--measure with --ranks {ranks}, but {started} ranks were started"
            ))
            .hint(format!("mpirun -np {ranks} hpctrain plan --measure, or omit --ranks"))),
            _ => Ok(()),
        }
    }

    fn print(&self, report: &PlanReport<'_>) -> Result<()> {
        say(match self.json {
            true => report.json()?,
            false => report.text(SHOWN_LAYOUTS, self.all),
        });
        Ok(())
    }
}

/// Plans from a description of a machine, or from an estimate of this one.
fn plan_described(args: &PlanArgs, config: &Config, name: &str, ranks: usize) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = |per_node: usize| config.run.threads.unwrap_or((cores / per_node).max(1));
    let resident = memory::resident().0;
    let held = |messages_on_device, per_node: usize| BaselineMemory {
        messages: 0,
        messages_on_device,
        resident,
        cache: 0,
        foreign_ranks: usize::from(ranks > per_node),
        replaced: 0,
    };
    let given = args.nodes.map(|nodes| ranks_per_node(ranks, nodes as usize)).transpose()?;
    let (machine, per_node, held) = match &args.machine {
        Some(machine) => {
            let machine = Machine::named(machine)?;
            let per_node = given.unwrap_or(machine.ranks_per_node.min(ranks));
            if per_node > machine.ranks_per_node {
                let most = machine.ranks_per_node;
                let name = &machine.name;
                return Err(Error::input(format!(
                    "{per_node} ranks on each node, but {name} has room for {most}"
                ))
                .hint(format!("--nodes {} or more", ranks.div_ceil(most))));
            }
            let held = held(machine.gpu, per_node);
            (machine, per_node, held)
        }
        None => {
            if config.needs_gpu() {
                return Err(Error::input("the configuration is for GPUs, whose rates are not known here")
                    .hint("describe them: --machine h100x8; or measure them: mpirun -np N hpctrain plan --measure"));
            }
            let per_node = given.unwrap_or(ranks);
            let held = held(false, per_node);
            let limit = config.run.memory_limit.map_or(usize::MAX, |limit| limit.0);
            let share =
                memory::available(0).map_or(usize::MAX, |bytes| bytes / per_node + held.resident);
            (Machine::estimate_local(per_node, threads(per_node), limit.min(share)), per_node, held)
        }
    };
    let facts = environment(config, ranks, threads(per_node), machine.gpu)?;
    let place = SearchLimits { room: machine.memory_budget(), held, per_node };
    let rates = format!("{} ({})", machine.name, machine.source);
    let choice = search_layouts(config, &facts, &place, |_| Ok(machine))?;
    args.print(&PlanReport { network: name, ranks, per_node, rates, choice: &choice, trials: &[] })
}

/// Returns the number of ranks on each node, which is the same on all.
fn ranks_per_node(ranks: usize, nodes: usize) -> Result<usize> {
    if ranks.is_multiple_of(nodes) {
        Ok(ranks / nodes)
    } else {
        Err(Error::input(format!("--nodes {nodes} does not divide --ranks {ranks}"))
            .hint("every node has the same number of ranks"))
    }
}

/// Plans from rates that are measured on these ranks and devices.
fn plan_measured<B: Kernels, F: Fn(&ResolvedConfig) -> Result<B>>(
    args: &PlanArgs,
    config: &Config,
    name: &str,
    here: &SearchEnvironment<'_, B, F>,
) -> Result<()> {
    let (mut choice, per_node) = search_layouts_here(config, here)?;
    let trials = run_trials(&mut choice, here, args.tries)?;
    if here.comm.rank() > 0 {
        return Ok(());
    }
    let ranks = here.comm.size();
    let rates = format!("measured here, {}", here.comm.library());
    args.print(&PlanReport {
        network: name,
        ranks,
        per_node,
        rates,
        choice: &choice,
        trials: &trials,
    })
}

/// Plans from rates that are measured on threads of this process as ranks.
fn plan_on_threads(args: &PlanArgs) -> Result<()> {
    let (config, name) = args.load()?;
    if config.needs_gpu() {
        return Err(Error::input(
            "ranks as threads of this process compute on CPUs, but the configuration is for GPUs",
        )
        .hint("mpirun -np N hpctrain plan --measure"));
    }
    check_cpu(&config)?;
    let ranks = args.ranks.unwrap_or(1) as usize;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = Some((cores / ranks).max(1));
    on_threads(ranks, |comm: &Comm<Cpu>| {
        plan_measured(
            args,
            &config,
            &name,
            &SearchEnvironment {
                comm,
                backend: open_cpu,
                gpu: None,
                threads,
                vocabulary: None,
                replaced: 0,
            },
        )
    })
    .map(drop)
}
