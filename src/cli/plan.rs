//! `hpctrain plan`: the layouts of a network on so many ranks, the fastest that fits first.

use clap::Args;

use super::train::SourceArgs;
use crate::backend::Kernels;
use crate::backend::cpu::Cpu;
use crate::comm::{Comm, Launch};
use crate::config::{Config, LayoutMode, ResolvedConfig};
use crate::engine::memory::{self, Held};
use crate::engine::on_threads;
use crate::error::{Error, Result};
use crate::gpu_assignment::{cpu, cpu_can, place};
use crate::job::{self, fail};
use crate::planner::{
    Here, Machine, PlanReport, SearchLimits, choose, choose_here, facts, try_out,
};
use crate::telemetry::say;

/// Layouts that are shown without `--all`.
const SHOWN: usize = 10;

/// Arguments of `hpctrain plan`.
#[derive(Args)]
#[command(
    after_help = "Keys of [parallel], and batch.micro, that a file or --set gives stay as they are.\n\
                        Example: mpirun -np 4 hpctrain plan --preset gpt-baby --measure"
)]
pub struct PlanArgs {
    #[command(flatten)]
    sources: SourceArgs,
    /// Ranks; left out, those that mpirun or srun starts.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    ranks: Option<u32>,
    /// Nodes that the ranks are on, equally many on each; left out, as many as the machine's
    /// description needs, or one.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "measure")]
    nodes: Option<u32>,
    /// The machine: a100x8, h100x8, h200x8, or a file; left out, this one, by a rough look.
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "measure")]
    machine: Option<String>,
    /// Time blocks and collectives on all ranks at once: those of mpirun, or threads of this
    /// process.
    #[arg(long)]
    measure: bool,
    /// Run some steps of the first so many layouts as well, and order those by their real time.
    #[arg(long = "try", value_name = "N", default_value_t = 0, requires = "measure")]
    tries: usize,
    /// Show every layout, and every one that is left out.
    #[arg(long)]
    all: bool,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

/// Runs one rank; returns the exit code.
pub fn run(args: &PlanArgs, launch: Option<&Launch>) -> i32 {
    if launch.is_none() && args.measure {
        return on_threads_here(args).map_or_else(|e| fail(&e), |()| 0);
    }
    job::run(launch, super::with_checkpoint::patience(&[]), |comm| {
        let world = comm.world();
        let (config, name) = world.all_ok(args.load())?;
        if !args.measure {
            let ranks = args.ranks.map_or(comm.size(), |ranks| ranks as usize);
            return world
                .all_ok(if comm.rank() == 0 {
                    described(args, &config, &name, ranks)
                } else {
                    Ok(())
                })
                .map(|()| 0);
        }
        world.all_ok(args.check_ranks(comm.size()))?;
        match place(comm, &config)? {
            None => {
                world.all_ok(cpu_can(&config))?;
                measured(
                    args,
                    &config,
                    &name,
                    &Here { comm, backend: cpu, gpu: None, threads: None, vocabulary: None },
                )?;
            }
            Some(gpu) => {
                let comm = &gpu.beside(comm);
                let backend = |plan: &ResolvedConfig| gpu.backend(plan);
                let here =
                    Here { comm, backend, gpu: Some(gpu.memory), threads: None, vocabulary: None };
                measured(args, &config, &name, &here)?;
            }
        }
        Ok(0)
    })
}

impl PlanArgs {
    fn load(&self) -> Result<(Config, String)> {
        let (mut config, name) = self.sources.load()?;
        config.parallel.layout = LayoutMode::Given;
        Ok((config.of_any_length(), name))
    }

    /// Ranks that are measured are those that run.
    fn check_ranks(&self, started: usize) -> Result<()> {
        match self.ranks {
            Some(ranks) if ranks as usize != started => Err(Error::input(format!(
                "--measure with --ranks {ranks}, but {started} ranks were started"
            ))
            .hint(format!("mpirun -np {ranks} hpctrain plan --measure, or leave --ranks out"))),
            _ => Ok(()),
        }
    }

    fn print(&self, report: &PlanReport<'_>) -> Result<()> {
        say(match self.json {
            true => report.json()?,
            false => report.text(SHOWN, self.all),
        });
        Ok(())
    }
}

/// With rates of a description, or of a look at this machine.
fn described(args: &PlanArgs, config: &Config, name: &str, ranks: usize) -> Result<()> {
    let on_nodes = |nodes: usize| {
        let divides = ranks.is_multiple_of(nodes);
        let error = || Error::input(format!("--nodes {nodes} does not divide --ranks {ranks}"));
        if divides { Ok(ranks / nodes) } else { Err(error().hint("as many ranks on each node")) }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = |per_node: usize| config.run.threads.unwrap_or((cores / per_node).max(1));
    let resident = memory::resident().0;
    let held = |messages_on_device| Held { messages: 0, messages_on_device, resident, cache: 0 };
    let asked = args.nodes.map(|nodes| on_nodes(nodes as usize)).transpose()?;
    let (machine, per_node, held) = match &args.machine {
        Some(machine) => {
            let machine = Machine::named(machine)?;
            let per_node = asked.unwrap_or(machine.ranks_per_node.min(ranks));
            if per_node > machine.ranks_per_node {
                let most = machine.ranks_per_node;
                let name = &machine.name;
                return Err(Error::input(format!(
                    "{per_node} ranks on each node, but {name} has room for {most}"
                ))
                .hint(format!("--nodes {} or more", ranks.div_ceil(most))));
            }
            let held = held(machine.gpu);
            (machine, per_node, held)
        }
        None => {
            if config.needs_gpu() {
                return Err(Error::input("the configuration is for GPUs, whose rates are not known here")
                    .hint("describe them: --machine h100x8; or measure them: mpirun -np N hpctrain plan --measure"));
            }
            let per_node = asked.unwrap_or(ranks);
            let held = held(false);
            let limit = config.run.memory_limit.map_or(usize::MAX, |limit| limit.0);
            let share =
                memory::available().map_or(usize::MAX, |bytes| bytes / per_node + held.resident);
            (Machine::here(per_node, threads(per_node), limit.min(share)), per_node, held)
        }
    };
    let facts = facts(config, ranks, threads(per_node), machine.gpu)?;
    let place = SearchLimits { room: machine.room(), held, per_node };
    let rates = format!("{} ({})", machine.name, machine.source);
    let choice = choose(config, &facts, &place, |_| Ok(machine))?;
    args.print(&PlanReport { network: name, ranks, per_node, rates, choice: &choice, trials: &[] })
}

/// With rates of the ranks and devices at hand.
fn measured<B: Kernels, F: Fn(&ResolvedConfig) -> Result<B>>(
    args: &PlanArgs,
    config: &Config,
    name: &str,
    here: &Here<'_, B, F>,
) -> Result<()> {
    let (mut choice, per_node) = choose_here(config, here)?;
    let trials = try_out(&mut choice, here, args.tries)?;
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

/// With ranks as threads of this process.
fn on_threads_here(args: &PlanArgs) -> Result<()> {
    let (config, name) = args.load()?;
    if config.needs_gpu() {
        return Err(Error::input(
            "threads of this process as ranks compute on CPUs, but the configuration is for GPUs",
        )
        .hint("mpirun -np N hpctrain plan --measure"));
    }
    cpu_can(&config)?;
    let ranks = args.ranks.unwrap_or(1) as usize;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = Some((cores / ranks).max(1));
    let rank = |comm: &Comm<Cpu>| {
        measured(
            args,
            &config,
            &name,
            &Here { comm, backend: cpu, gpu: None, threads, vocabulary: None },
        )
    };
    on_threads(ranks, rank).map(drop)
}
