//! `hpctrain supervise`: restarts a job until its run is complete.

use clap::{Args, Parser};

use super::train::TrainArgs;
use crate::config::{Config, check_ranks};
use crate::error::{Error, Result};
use crate::job::fail;
use crate::supervise::{
    AGENT, ElasticHosts, HOST_PLACEHOLDER, HOSTS_PLACEHOLDER, HostList, Hosts, RANKS_PLACEHOLDER,
    SuperviseOptions, answering, launcher_of, supervise,
};

/// Arguments of `hpctrain supervise`.
#[derive(Debug, Args)]
pub struct SuperviseArgs {
    /// Number of consecutive restarts without a new checkpoint after which to give up.
    #[arg(long, value_name = "N", default_value_t = 3)]
    retries: u32,
    /// Exit with code 75 when the job does, so that a batch system requeues it, instead of
    /// restarting it.
    #[arg(long)]
    requeue: bool,
    /// The hosts that the job may use, with their numbers of ranks, such as node1:8,node2:8. At
    /// each start, {hosts} and {ranks} in the command are replaced by the hosts that respond and
    /// the largest number of ranks on them that the layout allows.
    #[arg(long, value_name = "HOST:RANKS,…")]
    hosts: Option<String>,
    /// The program that runs a command on another host; called with the host and `true`, it must
    /// succeed for the host to be used.
    #[arg(long, value_name = "COMMAND", default_value = AGENT, requires = "hosts")]
    agent: String,
    /// Start the ranks of an elastic job on the hosts, without another launcher: the command after
    /// -- is that of a rank, with elastic.on=true. Ranks and hosts that are lost do not end the job,
    /// and hosts that return join it.
    #[arg(long, requires = "hosts")]
    elastic: bool,
    /// With --elastic, the command that runs another one on a host.
    #[arg(long, value_name = "COMMAND", default_value = AGENT_LAUNCHER, requires = "elastic")]
    agent_launcher: String,
    /// The job's command, after `--`: a launcher with its arguments, or this program.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// The default of `--agent-launcher`.
const AGENT_LAUNCHER: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 \
                              -o ServerAliveCountMax=3 {host}";

/// Arguments of `hpctrain elastic-hosts`, which `supervise --elastic` starts.
#[derive(Debug, Args)]
pub struct ElasticHostsArgs {
    /// The hosts, with their numbers of ranks.
    #[arg(long)]
    hosts: String,
    /// The command that runs another one on a host.
    #[arg(long)]
    agent_launcher: String,
    /// The command of a rank.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// The arguments of a job's command from `train` on.
#[derive(Parser)]
struct TrainCommand {
    #[command(flatten)]
    train: TrainArgs,
}

/// Supervises a job and returns the exit code of its last start.
pub fn run(args: SuperviseArgs) -> i32 {
    options(args).and_then(|options| supervise(&options)).unwrap_or_else(|e| fail(&e))
}

/// Starts an elastic job on several hosts and returns its exit code.
pub fn run_elastic_hosts(args: &ElasticHostsArgs) -> i32 {
    elastic_hosts(args).and_then(|hosts| hosts.run()).unwrap_or_else(|e| fail(&e))
}

/// Returns the elastic job that the arguments describe, on the hosts that answer.
fn elastic_hosts(args: &ElasticHostsArgs) -> Result<ElasticHosts> {
    let config = elastic_config(&args.command)?;
    let list: HostList = args.hosts.parse()?;
    let launcher: Vec<String> = args.agent_launcher.split_whitespace().map(Into::into).collect();
    if !launcher.iter().any(|word| word.contains(HOST_PLACEHOLDER)) {
        return Err(Error::input(format!(
            "--agent-launcher {:?} without {HOST_PLACEHOLDER}",
            args.agent_launcher
        ))
        .hint(format!("such as {AGENT_LAUNCHER:?}")));
    }
    let hosts = answering(&list, |host| launcher_of(&launcher, host));
    if hosts.is_empty() {
        return Err(Error::comm(format!("none of the hosts {} answers", args.hosts)));
    }
    check_ranks(&config, hosts.iter().map(|host| host.slots).sum())?;
    Ok(ElasticHosts {
        hosts,
        launcher,
        root: config.run.root.clone().into(),
        command: args.command.clone(),
        rejoin: config.elastic.rejoin,
    })
}

/// Returns the configuration of an elastic job by the command of a rank.
fn elastic_config(command: &[String]) -> Result<Config> {
    let config = training_config(command)?;
    if config.elastic.on {
        return Ok(config);
    }
    Err(Error::input("--elastic, but elastic.on = false in the command")
        .hint("add --set elastic.on=true to the command after --"))
}

/// Returns the configuration of a job by its command, whose arguments after `train` are those of
/// this program.
pub fn training_config(command: &[String]) -> Result<Config> {
    const HINT: &str = "give the command of a rank, such as hpctrain train --config my.toml";
    let Some(at) = command.iter().rposition(|word| word == "train") else {
        return Err(Error::input("no train in the command after --").hint(HINT));
    };
    let training = TrainCommand::try_parse_from(&command[at..]).map_err(|e| {
        Error::input(format!("the arguments after train: {}", first_line(&e.to_string())))
            .hint(HINT)
    })?;
    training.train.config()
}

/// Converts the arguments to options.
fn options(args: SuperviseArgs) -> Result<SuperviseOptions> {
    let SuperviseArgs { retries, requeue, hosts, agent, elastic, agent_launcher, command } = args;
    if let (true, Some(list)) = (elastic, &hosts) {
        elastic_config(&command)?;
        let _: HostList = list.parse()?;
        let program = std::env::current_exe()
            .map_err(|e| Error::internal(format!("cannot find this program: {e}")))?;
        let mut words = vec![program.to_string_lossy().into_owned(), "elastic-hosts".into()];
        words.extend(["--hosts".into(), list.clone(), "--agent-launcher".into(), agent_launcher]);
        words.push("--".into());
        words.extend(command);
        return Ok(SuperviseOptions { command: words, retries, requeue, hosts: None });
    }
    let hosts = hosts.map(|list| parse_hosts(&list, &agent, &command)).transpose()?;
    let placeholder = command.iter().find(|word| {
        hosts.is_none() && (word.contains(HOSTS_PLACEHOLDER) || word.contains(RANKS_PLACEHOLDER))
    });
    if let Some(word) = placeholder {
        return Err(Error::input(format!("{word} in the command, but no --hosts"))
            .hint("hpctrain supervise --hosts node1:8,node2:8 -- mpirun --host {hosts} -np {ranks} hpctrain train"));
    }
    Ok(SuperviseOptions { command, retries, requeue, hosts })
}

/// Parses the hosts, and finds the numbers of ranks that the job's layout allows on them.
fn parse_hosts(list: &str, agent: &str, command: &[String]) -> Result<Hosts> {
    let list: HostList = list.parse()?;
    let hint = "hpctrain supervise --hosts node1:8,node2:8 -- mpirun --host {hosts} -np {ranks} hpctrain train";
    if !command.iter().any(|word| word.contains(HOSTS_PLACEHOLDER)) {
        return Err(
            Error::input(format!("--hosts, but no {HOSTS_PLACEHOLDER} in the command")).hint(hint)
        );
    }
    // The arguments of `train` give the layout, and so the allowed numbers of ranks.
    let Some(at) = command.iter().rposition(|word| word == "train") else {
        return Err(Error::input("--hosts, but no train in the command").hint(hint));
    };
    let training = TrainCommand::try_parse_from(&command[at..]).map_err(|e| {
        Error::input(format!("the arguments after train: {}", first_line(&e.to_string())))
            .hint(hint)
    })?;
    let config = training.train.config()?;
    let others = training.train.non_training_ranks();
    let allowed: Vec<usize> = (1..=list.slots())
        .filter(|ranks| check_job_ranks(&config, *ranks, others).is_ok())
        .collect();
    if allowed.is_empty() {
        check_job_ranks(&config, list.slots(), others)?;
    }
    let agent = agent.split_whitespace().map(str::to_string).collect();
    Ok(Hosts { list, agent, allowed })
}

/// Returns an error if the layout does not allow a job of `ranks` ranks, of which `others` do not
/// train.
fn check_job_ranks(config: &Config, ranks: usize, others: usize) -> Result<()> {
    match ranks.checked_sub(others).filter(|training| *training > 0) {
        Some(training) => check_ranks(config, training),
        None => Err(Error::input(format!(
            "{ranks} ranks, of which {others} are servers or evaluators, leave none to train"
        ))
        .hint("give more hosts, or more ranks on each")),
    }
}

fn first_line(text: &str) -> &str {
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(list: &str, command: &str) -> Result<Hosts> {
        parse_hosts(list, "ssh -x", &command.split(' ').map(str::to_string).collect::<Vec<_>>())
    }

    /// Returns the numbers of ranks that a job with more arguments may have on these hosts.
    fn allowed(list: &str, more: &str) -> Result<Vec<usize>> {
        let command = format!(
            "mpirun --host {{hosts}} -np {{ranks}} hpctrain train --set batch.global=24 {more}"
        );
        asked(list, command.trim()).map(|hosts| hosts.allowed)
    }

    #[test]
    fn the_layout_of_the_command_says_how_many_ranks_may_be() {
        assert_eq!(allowed("a:2,b:2", "--set parallel.virtual_ranks=4"), Ok(vec![1, 2, 3, 4]));
        let twelve = "--set parallel.virtual_ranks=12";
        assert_eq!(allowed("a:4,b:3", twelve), Ok(vec![1, 2, 3, 4, 5, 6, 7]));
        let equal = format!("{twelve} --set comm.algorithm=ring");
        assert_eq!(allowed("a:4,b:3", &equal), Ok(vec![1, 2, 3, 4, 6]));
        assert_eq!(
            allowed("a:4,b:3", "--set parallel.virtual_ranks=4 --set parallel.pipeline=2"),
            Ok(vec![2, 4, 6])
        );
        assert_eq!(
            allowed("a:4", "--set parallel.virtual_ranks=4 --evaluators 1"),
            Ok(vec![2, 3, 4])
        );
        let error = allowed(
            "a:2,b:1",
            "--set parallel.virtual_ranks=4 --set parallel.shard=4 --set parallel.zero=1",
        )
        .unwrap_err();
        assert!(error.to_string().contains("parallel.shard"), "{error}");
    }

    #[test]
    fn commands_without_places_are_refused() {
        for (list, command, words) in [
            ("a:2", "mpirun -np 2 hpctrain train", "no {hosts} in the command"),
            ("a:2", "mpirun --host {hosts} ./script", "no train in the command"),
            ("a:2", "mpirun --host {hosts} hpctrain train --sett x", "--sett"),
            ("a:x", "mpirun --host {hosts} hpctrain train", "--hosts a:x"),
        ] {
            let error = asked(list, command).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let command = ["mpirun", "-np", "{ranks}", "hpctrain", "train"].map(String::from).to_vec();
        let args = SuperviseArgs {
            retries: 0,
            requeue: false,
            hosts: None,
            agent: AGENT.into(),
            elastic: false,
            agent_launcher: AGENT_LAUNCHER.into(),
            command,
        };
        assert!(
            options(args)
                .unwrap_err()
                .to_string()
                .contains("{ranks} in the command, but no --hosts")
        );
    }
}
