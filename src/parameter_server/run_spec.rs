//! The specification of a run with parameter servers: everything that a worker or a server needs to
//! take part.

use serde::{Deserialize, Serialize};

use super::network_spec::NetworkSpec;
use super::partitioner::{Granules, ParamRange, partition};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::layout::UnitLayout;
use hpctrain_checkpoint::Progress;
use hpctrain_config::{
    Config, EmbeddingPlacement, Environment, LayerList, LossKind, Model, Partition, ResolvedConfig,
    Staleness, TableShardingChoice, TableUpdates, WorkShares, resolve,
};
use hpctrain_data::Preprocessing;
use hpctrain_device::format_bytes;
use hpctrain_nn::CustomModel;
use hpctrain_nn::layers::Layer;
use hpctrain_nn::loss::{CustomLoss, CustomMetric};
use hpctrain_parallel::{Storage, TableSharding, Zero, state_names};

/// The specification of a run, which its coordinator sends to servers and workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSpec {
    /// The number of this start of the run's servers; messages of earlier generations are ignored.
    pub generation: u64,
    /// The configuration as given, since each worker resolves number formats for its own device.
    #[serde(deserialize_with = "hpctrain_config::deserialize_json")]
    pub config: Config,
    /// The custom network, whose name the configuration has, or the tensors of custom functions.
    pub network: Option<NetworkSpec>,
    /// The number of workers the run is planned for.
    pub workers: usize,
    /// The number of token ids of the training data, if it has tokens.
    pub vocabulary: Option<usize>,
    /// The preprocessing of the samples.
    pub preprocessing: Option<Preprocessing>,
    /// The progress at which this generation started.
    pub start: Progress,
    /// The ranges of each server.
    pub pieces: Vec<Vec<ParamRange>>,
    /// The elements of a row of the embedding tables, if their updates are sparse.
    #[serde(default)]
    pub row_width: Option<usize>,
    /// The host and port of each server.
    pub addresses: Vec<String>,
    /// Whether all processes record a trace.
    pub trace: bool,
    /// The names of the custom metrics of evaluations, in order.
    #[serde(default)]
    pub metrics: Vec<String>,
}

impl RunSpec {
    /// Returns the number of a server's first ranges that are rows of embedding tables with sparse
    /// updates.
    pub fn table_ranges(&self, server: usize) -> usize {
        let of_tables = |piece: &&ParamRange| self.row_width.is_some() && piece.unit == TABLES;
        self.pieces.get(server).into_iter().flatten().take_while(of_tables).count()
    }

    /// Checks that a worker's program measures the custom metrics of the run.
    ///
    /// # Errors
    /// Returns an error if they have other names, or another order.
    pub fn check_metrics(&self, metrics: &[CustomMetric]) -> Result<()> {
        if self.metrics.iter().map(String::as_str).eq(metrics.iter().map(CustomMetric::name)) {
            return Ok(());
        }
        let own: Vec<&str> = metrics.iter().map(CustomMetric::name).collect();
        Err(Error::input(format!(
            "the run has the custom metrics {:?}, but this program defines {own:?}",
            self.metrics
        ))
        .hint("start all processes of a run with the same program"))
    }

    /// Resolves the configuration of the run as that of one rank, with the virtual ranks of all
    /// workers (synchronous training) or the samples of all workers (asynchronous training).
    ///
    /// # Errors
    /// Returns the errors of [`resolve`], or an error if parameter servers do not support a key.
    pub fn plan(
        config: &Config,
        workers: usize,
        vocabulary: Option<usize>,
        threads: usize,
    ) -> Result<ResolvedConfig> {
        check(config)?;
        let is_synchronous = config.parameter_server.staleness == Staleness::Bound(0);
        let mut config = config.clone();
        if is_synchronous {
            config.parallel.virtual_ranks.get_or_insert(workers);
        } else {
            config.parallel.virtual_ranks = Some(1);
            // The batch of one worker must be valid, too.
            resolve(
                worker_config(&config, workers),
                &Environment { ranks: 1, threads, vocabulary, on_gpu: false },
            )?;
            config.batch.global = worker_batch(&config, workers) * workers as u64;
        }
        (config.precision, config.parallel.replica) = Default::default();
        // Resolving would suggest other virtual ranks, which do not help with servers.
        if is_synchronous
            && let LayerList::List(layers) = &config.model.layers
            && let Some(place) = Layer::synchronised(layers, "model.layers")
        {
            return Err(batch_norm_refused(&format!("batch normalisation ({place})")));
        }
        let given_threads = config.run.threads;
        let mut plan =
            resolve(config, &Environment { ranks: 1, threads, vocabulary, on_gpu: false })?;
        // Each process has its own number.
        plan.config.run.threads = given_threads;
        if plan.loss.over_batch() {
            return Err(Error::input(
                "the loss depends on all samples of a batch, but with parameter servers each \
                 worker has a part of it",
            )
            .hint("train without --servers, or use another loss"));
        }
        let has_statistics = layouts(&plan)
            .iter()
            .flat_map(|unit| &unit.tensors)
            .any(|tensor| tensor.average.is_some());
        if is_synchronous && has_statistics {
            return Err(batch_norm_refused("batch normalisation"));
        }
        if !is_synchronous && plan.update_rule.is_layerwise() {
            return Err(Error::input(
                "optimizer.kind = lamb and lars require norms of whole tensors, which no server has",
            )
            .hint("set parameter_server.staleness = 0, or use another optimizer"));
        }
        Ok(plan)
    }

    /// Returns the configuration with epochs converted to steps, for this number of workers and
    /// training samples.
    pub fn with_epochs_in_steps(config: &Config, workers: usize, samples: u64) -> Config {
        let mut config = config.clone();
        let given = config.batch.global;
        if config.parameter_server.staleness != Staleness::Bound(0) {
            config.batch.global = worker_batch(&config, workers) * workers as u64;
        }
        config.count_epochs(samples);
        config.batch.global = given;
        config
    }

    /// Returns the specification with the custom network and the custom loss of this program, of
    /// which messages and files have only the names.
    ///
    /// # Errors
    /// Returns an error if they are not those of the run.
    pub fn with_program(
        mut self,
        network: Option<&CustomModel>,
        loss: Option<&CustomLoss>,
    ) -> Result<Self> {
        NetworkSpec::check(self.network.as_ref(), network)?;
        let names = [self.config.loss.own.as_ref(), loss].map(|loss| loss.map(CustomLoss::name));
        if names[0] != names[1] {
            let [run, own] = names.map(|name| match name {
                Some(name) => format!("the custom loss {name:?}"),
                None => "no custom loss".into(),
            });
            return Err(Error::input(format!("the run has {run}, but this program defines {own}"))
                .hint("start all processes of a run with the same program"));
        }
        if let Some(network) = network {
            self.config.model = Model::from_custom(network.clone());
        }
        self.config.loss.own = loss.cloned();
        Ok(self)
    }

    /// Returns the specification with the tensors of its custom network, if it has one; servers
    /// need no more of it.
    pub fn with_held_network(mut self) -> Self {
        if let Some(network) = &self.network {
            self.config.model = Model::from_custom(network.model());
        }
        // Servers compute no loss.
        if self.config.loss.own.take().is_some() && self.config.model.vocabulary.is_none() {
            self.config.loss.kind = LossKind::Mse;
        }
        self
    }

    /// Returns whether training is synchronous: all workers compute each step together.
    pub fn is_synchronous(&self) -> bool {
        self.config.parameter_server.staleness == Staleness::Bound(0)
    }

    /// Returns the number of shares of a step that are assigned to workers: virtual ranks, or one
    /// batch per worker.
    pub fn shares(&self, plan: &ResolvedConfig) -> u64 {
        if self.is_synchronous() { plan.virtual_ranks as u64 } else { self.workers as u64 }
    }

    /// Resolves the configuration of one worker, with all virtual ranks of a step or with its own
    /// batch.
    ///
    /// # Errors
    /// Returns the same errors as [`RunSpec::plan`].
    pub fn worker_plan(&self, threads: usize, on_gpu: bool) -> Result<ResolvedConfig> {
        let of_run = Self::plan(&self.config, self.workers, self.vocabulary, threads)?;
        let mut config = if self.is_synchronous() {
            let mut config = self.config.clone();
            (config.parallel.virtual_ranks, config.batch.micro) =
                (Some(of_run.virtual_ranks), Some(of_run.micro));
            config.parallel.replica = None;
            config
        } else {
            worker_config(&self.config, self.workers)
        };
        // The tables are the same on all processes, whatever their device.
        config.optimizer.tables = match of_run.sparse_tables {
            Some(_) => TableUpdates::Sparse,
            None => TableUpdates::Dense,
        };
        if on_gpu && of_run.sparse_tables.is_some() {
            config.model.place.tables = EmbeddingPlacement::Host;
        }
        let facts = Environment { ranks: 1, threads, vocabulary: self.vocabulary, on_gpu };
        let mut plan = resolve(config, &facts)?;
        plan.sparse_tables = plan.sparse_tables.map(|_| TableSharding::Servers);
        Ok(plan)
    }
}

/// Returns the configuration of a worker in asynchronous training.
fn worker_config(config: &Config, workers: usize) -> Config {
    let mut config = config.clone();
    // The servers update the parameters, so a worker has no learning rate.
    config.set_trial_batch(worker_batch(&config, workers));
    (config.parallel.virtual_ranks, config.parallel.replica) = (Some(1), None);
    config
}

/// Returns the number of samples of a worker's batch in asynchronous training.
pub fn worker_batch(config: &Config, workers: usize) -> u64 {
    let share = (config.batch.global as f64 / workers as f64).round() as u64;
    config.batch.worker.unwrap_or(share).max(1)
}

/// Returns the layouts of the model's units on servers and workers.
pub fn layouts(plan: &ResolvedConfig) -> Vec<UnitLayout> {
    let slices = plan.tensor_shards(0);
    let blocks = plan.network.cpu_blocks(&slices);
    let virtual_ranks = if plan.config.parameter_server.staleness == Staleness::Bound(0) {
        plan.virtual_ranks
    } else {
        1
    };
    blocks
        .iter()
        .map(|block| UnitLayout::sharded(block.name(), block.tensors(), virtual_ranks, &slices))
        .collect()
}

/// Returns the ranges of each of `servers` servers.
///
/// # Errors
/// Returns the errors of [`partition`].
pub fn ranges_of_servers(plan: &ResolvedConfig, servers: usize) -> Result<Vec<Vec<ParamRange>>> {
    // With synchronous training, norms are sums over virtual shards, one per virtual rank.
    // Otherwise a range starts at a cache line.
    let is_synchronous = plan.config.parameter_server.staleness == Staleness::Bound(0);
    let row_width = row_width(plan);
    let granules = |unit: usize, layout: &UnitLayout| match row_width {
        // Rows are whole, and their norm does not depend on the ranges.
        Some(elements) if unit == TABLES => {
            let rows = layout.tensors.iter().map(|tensor| tensor.shape[0]).sum();
            Granules { count: rows, elements }
        }
        _ if is_synchronous => Granules::equal(layout, plan.virtual_ranks),
        _ => Granules::equal(layout, layout.padded / 16),
    };
    partition(&layouts(plan), granules, plan.config.parameter_server.partition, servers)
}

/// The unit of embedding tables with sparse updates, if the network has them.
pub const TABLES: usize = 0;

/// Returns the elements of a row of the embedding tables, if their updates are sparse.
pub fn row_width(plan: &ResolvedConfig) -> Option<usize> {
    plan.sparse_tables?;
    layouts(plan)[TABLES].tensors.first().map(|tensor| tensor.shape[1])
}

/// Returns the error of synchronous training with `what`, which is batch normalisation.
fn batch_norm_refused(what: &str) -> Error {
    Error::input(format!(
        "parameter_server.staleness = 0 does not support {what}, whose samples depend on each other"
    ))
    .hint(
        "set parameter_server.staleness = \"none\" or a number above 0: each worker then takes the \
         statistics of its own batch; or train without --servers",
    )
}

/// Describes the largest range, if it has more bytes than `parameter_server.partition = max:SIZE`
/// allows because units are cut only between virtual ranks.
pub fn oversized_range(plan: &ResolvedConfig, pieces: &[Vec<ParamRange>]) -> Option<String> {
    let server_keys = &plan.config.parameter_server;
    let Partition::Max(size) = server_keys.partition else { return None };
    let longest = pieces.iter().flatten().map(|piece| piece.range.len()).max()?;
    let largest = longest * size_of::<f32>();
    // Asynchronous training cuts at cache lines, so that a range is larger by less than one.
    if largest <= size.0 || server_keys.staleness != Staleness::Bound(0) {
        return None;
    }
    let partition = server_keys.partition;
    let virtual_ranks = plan.virtual_ranks;
    let largest = format_bytes(largest);
    Some(format!(
        "parameter_server.partition = {partition}, but the largest range has {largest}: with \
         parameter_server.staleness = 0 a unit is cut only between virtual ranks, of which there \
         are {virtual_ranks} (hint: raise parallel.virtual_ranks, or set a larger max)"
    ))
}

/// Describes what each server holds, for `log.placement`: one line each.
pub fn placement<'a>(
    plan: &ResolvedConfig,
    pieces: &'a [Vec<ParamRange>],
    addresses: &'a [String],
) -> impl Iterator<Item = String> + 'a {
    let states = state_names(Some(plan.update_rule), plan.ema, None).len();
    pieces.iter().zip(addresses).map(move |(ranges, address)| {
        let elements: usize = ranges.iter().map(|range| range.range.len()).sum();
        let bytes = elements * size_of::<f32>();
        format!(
            "{} ranges: parameters {} and optimizer state {} on CPU of server {address}",
            ranges.len(),
            format_bytes(bytes),
            format_bytes(states * bytes)
        )
    })
}

/// Refuses keys that parameter servers do not support.
fn check(config: &Config) -> Result<()> {
    let parallel = &config.parallel;
    let refused = |what: String| {
        Err(Error::input(format!("{what}, but parameter servers do not support it"))
            .hint("omit it, or train without --servers"))
    };
    if parallel.zero != Zero::Zero {
        return refused(format!("parallel.zero = {}", u8::from(parallel.zero)));
    }
    if parallel.storage != Storage::Ranks {
        return refused("parallel.storage = central".into());
    }
    if config.lr_schedule.lr_by_batch.is_some()
        && config.parameter_server.staleness != Staleness::Bound(0)
    {
        return Err(Error::input(
            "lr_schedule.lr_by_batch requires parameter_server.staleness = 0: otherwise each \
             worker has a separate batch",
        )
        .hint("set optimizer.lr, the rate of a worker's update, instead"));
    }
    if config.batch.per_rank > 0 {
        return Err(Error::input(format!(
            "batch.per_rank = {}, but parameter servers do not support it: workers may join and \
             leave",
            config.batch.per_rank
        ))
        .hint(
            "set batch.global, of which each worker takes an equal part, or batch.worker with \
             parameter_server.staleness above 0",
        ));
    }
    let positive = [
        ("parameter_server.timeout", Some(config.parameter_server.timeout)),
        ("parameter_server.batches_per_lease", Some(config.parameter_server.batches_per_lease)),
        ("parameter_server.connections", Some(config.parameter_server.connections as u64)),
        ("parameter_server.workers", config.parameter_server.workers.map(|workers| workers as u64)),
        ("batch.worker", config.batch.worker),
    ];
    if let Some((key, _)) = positive.into_iter().find(|(_, value)| *value == Some(0)) {
        return Err(Error::input(format!("{key} = 0")).hint("it must be at least 1"));
    }
    let average = config.local_sgd.sync_every != hpctrain_config::Interval::Steps(0);
    let is_given = |value: Option<usize>| value.is_some_and(|value| value > 1);
    let counts = [
        ("parallel.tensor", parallel.tensor > 1),
        ("parallel.virtual_tensor_ranks", is_given(parallel.virtual_tensor_ranks)),
        ("parallel.pipeline", parallel.pipeline > 1),
        ("parallel.shard", is_given(parallel.shard)),
        ("parallel.replica", is_given(parallel.replica)),
        ("parallel.reduce = micro", parallel.reduce == hpctrain_config::ReduceChoice::Micro),
        ("local_sgd.sync_every", average),
        ("checkpoint.every = auto", config.checkpoint.every == hpctrain_config::OrAuto::Auto),
        ("parallel.layout = auto", parallel.layout == hpctrain_config::LayoutMode::Auto),
        ("offload.optimizer", config.offload.optimizer),
        ("model.place.tables = host", config.model.place.tables == EmbeddingPlacement::Host),
        ("run.device = mixed", config.run.device == hpctrain_config::DeviceChoice::Mixed),
        ("parallel.work_shares", parallel.work_shares != WorkShares::Equal),
        ("parallel.tables", parallel.tables != TableShardingChoice::Auto),
        ("offload.params", config.offload.params),
        ("offload.activations", config.offload.activations),
        ("log.histograms", config.log.histograms > 0),
        ("memory_checkpoint.every", config.memory_checkpoint.every.is_on()),
        ("data.order = files", config.data.order == hpctrain_config::DataOrder::Files),
        ("data.exclude", config.data.exclude.is_some()),
        (
            "comm.dtype = bf16 (their messages have parameter_server.message_dtype)",
            config.comm.dtype == hpctrain_config::MessageDtype::Bf16,
        ),
        ("device.matmul_autotune", config.device.matmul_autotune),
    ];
    match counts.into_iter().find(|(_, is_set)| *is_set) {
        Some((key, _)) => refused(format!("{key} is set")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_config::overlay;

    /// A metric that is never computed.
    struct Named(&'static str);

    impl hpctrain_nn::loss::MetricFunction for Named {
        fn name(&self) -> String {
            self.0.into()
        }

        fn forward<B: hpctrain_device::Kernels>(
            &self,
            _: &mut hpctrain_nn::autograd::Tape<'_, B>,
            output: &hpctrain_nn::autograd::Var<B>,
        ) -> Result<hpctrain_nn::autograd::Var<B>> {
            Ok(output.clone())
        }
    }

    #[test]
    fn workers_with_other_metrics_are_refused() {
        let terms = RunSpec {
            generation: 1,
            config: Config::default(),
            network: None,
            workers: 1,
            vocabulary: None,
            preprocessing: None,
            start: Progress::default(),
            pieces: vec![],
            row_width: None,
            addresses: vec![],
            trace: false,
            metrics: vec!["recall".into()],
        };
        let check = |names: &[&'static str]| {
            let own: Vec<_> = names.iter().map(|name| CustomMetric::new(Named(name))).collect();
            terms.check_metrics(&own).map_err(|e| e.to_string())
        };
        assert_eq!(check(&["recall"]), Ok(()));
        for other in [&[][..], &["mrr"], &["recall", "mrr"]] {
            let error = check(other).unwrap_err();
            let wanted =
                format!("[\"recall\"], but this program defines {other:?}\nhint: start all");
            assert!(error.contains(&wanted), "{error}");
        }
    }

    /// Returns the default configuration with these keys.
    fn config(keys: &[&str]) -> Config {
        let keys: Vec<String> = keys.iter().map(|key| (*key).into()).collect();
        overlay(&Config::default(), &keys).unwrap()
    }

    #[test]
    fn ranges_above_max_are_described() {
        let described = |keys: &[&str]| {
            let config = config(keys);
            let plan = RunSpec::plan(&config, 2, Some(64), 1).unwrap();
            oversized_range(&plan, &ranges_of_servers(&plan, 1).unwrap())
        };
        let max = "parameter_server.partition='max:4KiB'";
        let text = described(&[max, "parallel.virtual_ranks=2"]).unwrap();
        assert!(
            text.contains("parameter_server.partition = max:4KiB, but the largest range has ")
                && text.contains("of which there are 2 (hint: raise parallel.virtual_ranks"),
            "{text}"
        );
        assert_eq!(described(&["parameter_server.partition='max:1GiB'"]), None);
        assert_eq!(described(&["parameter_server.partition='fixed:1'"]), None);
        assert_eq!(described(&[max, "parameter_server.staleness='none'"]), None);
    }

    #[test]
    fn losses_over_the_whole_batch_are_refused() {
        let keys = [
            "model.kind='layers'",
            "model.input=[4]",
            "model.layers=[{kind='dense', units=6}]",
            "loss.kind='contrastive'",
        ];
        for staleness in ["0", "'none'"] {
            let staleness = format!("parameter_server.staleness={staleness}");
            let keys: Vec<&str> = keys.into_iter().chain([&staleness[..]]).collect();
            let error = RunSpec::plan(&config(&keys), 2, None, 1).unwrap_err().to_string();
            assert!(error.contains("depends on all samples of a batch"), "{error}");
        }
    }

    #[test]
    fn synchronised_batch_norm_has_a_hint_that_works() {
        let layers = "model.layers=[{kind='conv2d', filters=4, kernel=3}, {kind='batch_norm'}, \
                      {kind='relu'}, {kind='flatten'}, {kind='dense', units=10}]";
        let keys = ["model.kind='layers'", "model.input=[8, 8, 1]", layers];
        for more in ["", "parallel.virtual_ranks=1", "parallel.virtual_ranks=4"] {
            let keys: Vec<&str> =
                keys.into_iter().chain([more]).filter(|key| !key.is_empty()).collect();
            let error = RunSpec::plan(&config(&keys), 2, None, 1).unwrap_err().to_string();
            assert!(
                error.contains("batch normalisation (model.layers[1]), whose samples depend")
                    && error
                        .contains("hint: set parameter_server.staleness = \"none\" or a number"),
                "{error}"
            );
        }
        for staleness in ["'none'", "4"] {
            let staleness = format!("parameter_server.staleness={staleness}");
            let keys: Vec<&str> = keys.into_iter().chain([&staleness[..]]).collect();
            RunSpec::plan(&config(&keys), 2, None, 1).unwrap();
        }
    }
}
